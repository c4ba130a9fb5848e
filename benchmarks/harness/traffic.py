"""One batch of blocks on its way to the pool and back, and the copy that it is measured against."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness.measuring import timed
from kvpool import BlockRun, Client, ClientConfig, GroupSpec, InPlace, NamespaceSpec, checksum
from kvpool.client.block_io import DrainBlocks

Bytes = npt.NDArray[np.uint8]


class Traffic:
    """One batch of blocks that goes to the pool and back.

    Args:
        source, sink: uint8 [num_blocks, block_bytes], warm.
        num_shards: chunks in a block.
        transport: as in `ClientConfig`.
        number: keeps the blocks of several clients apart.
        settings: further ones of `ClientConfig`.
    """

    def __init__(
        self,
        endpoint: str,
        transport: str,
        source: Bytes,
        sink: Bytes,
        num_shards: int,
        number: int = 0,
        **settings: Any,
    ):
        num_blocks, block_bytes = source.shape
        group = GroupSpec("full_attention", 16, 8, 128, 128, num_shards, block_bytes // num_shards)
        spec = NamespaceSpec(f"benchmark-{transport}-{num_shards}", (group,))
        self._client = Client(
            ClientConfig(endpoint, transport=transport, stall_timeout_ms=5_000, insecure_network=True, **settings)
        )
        self._namespace = self._client.open_namespace(spec)
        self._run = BlockRun(0, [number.to_bytes(16, "big") + idx.to_bytes(16, "big") for idx in range(num_blocks)])
        self._source, self._sink = source, sink
        self.last_get_s = 0.0

    def put(self) -> float:
        """Seconds of one put into an empty pool."""
        self._client.admin.remove(self._namespace, [self._run])
        return timed(lambda: self._client.put_blocks(self._namespace, self._run, list(self._source)))

    def get(self) -> float:
        """Seconds of lookup, get and release; `last_get_s` is the get's part."""
        return self._get(InPlace(list(self._sink)))

    def _get(self, drain: DrainBlocks | InPlace, **options: Any) -> float:
        started = time.perf_counter()
        found = self._client.lookup(self._namespace, [self._run])
        looked_up = time.perf_counter()
        self._client.get(self._namespace, found.lease_id, [self._run], drain, **options)
        self.last_get_s = time.perf_counter() - looked_up
        self._client.release([found.lease_id])
        return time.perf_counter() - started

    def load(self) -> float:
        """Seconds of a get as an engine makes it: the lookup also locates, and nothing waits for the release."""
        started = time.perf_counter()
        found = self._client.lookup(self._namespace, [self._run], locate=True)
        leased = found.leased(0, 0, len(self._run))
        drain = InPlace(list(self._sink))
        self._client.get(self._namespace, found.lease_id, [self._run], drain, leased=leased)
        self._client.rpc.release_quietly(found.lease_id)
        return time.perf_counter() - started

    def get_without_lookup(self) -> float:
        """Seconds of the get's part of `get`."""
        self.get()
        return self.last_get_s

    def check(self) -> None:
        """Asserts that what was put is what comes back."""
        self._sink[:] = 0
        self.put()
        self.get()
        assert np.array_equal(self._source, self._sink), "the pool returned other bytes"

    def close(self) -> None:
        """Leaves the pool as empty as it was."""
        self._client.admin.remove(self._namespace, [self._run])
        self._client.close()


def copy_and_sum(source: Bytes, sink: Bytes, chunk_bytes: int) -> None:
    """The least that a verified copy costs: memcpy of each block, then xxh3 of each of its chunks."""
    for there, here in zip(source, sink, strict=True):
        here[:] = there
        for at in range(0, len(here), chunk_bytes):
            checksum(here[at : at + chunk_bytes])


def pair(nbytes: int) -> tuple[Bytes, Bytes]:
    """A random source and a touched sink, uint8 [nbytes]."""
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    return source, np.ones_like(source)
