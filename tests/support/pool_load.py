"""Engines without a model: requests of prompts that repeat, looked up, loaded, computed and stored as an engine does.

A request never waits on the pool without a deadline, and whatever the pool answers but right bytes counts as a miss:
its blocks are computed. A request fails if it takes too long, gets wrong bytes, or meets an error that is none of
kvpool's.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvpool.client.block_io import InPlace
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.rpc import Namespace
from kvpool.protocol.errors import DrainingError, KVPoolError, OutOfSpaceError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun
from tests.support.values import block_hash, payload

PROMPTS, BLOCKS = 24, 8
CALL_MS = 2_000
WAIT_MS = 200
"""How long a lookup waits for blocks on their way up from a tier."""
MAX_REQUEST_S = 10.0
THINK_S = 0.002
AWAY_S = 0.1
"""How long an engine goes on without the pool after an error, as its circuit breaker would have it."""


@dataclass
class Tally:
    """What became of one engine's requests.

    Args:
        served: when each request ended, and its blocks that the pool had, of `BLOCKS`.
        failed: why requests failed.
        lost: loads that were granted a lease, and stores that were granted a ticket, and failed.
    """

    served: list[tuple[float, int]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def hit_ratio(self, since: float, until: float) -> float:
        """Of the blocks of requests that ended in [since, until); 0 without requests."""
        hits = [num for at, num in self.served if since <= at < until]
        return sum(hits) / (BLOCKS * len(hits)) if hits else 0.0

    def back_at(self, since: float, ratio: float, window_s: float) -> float | None:
        """When the hit ratio of a window first reached `ratio` after `since`; None: not yet."""
        for at, _ in self.served:
            if at >= since + window_s and self.hit_ratio(at - window_s, at) >= ratio:
                return at
        return None


class PoolLoad:
    """One engine at one endpoint, a thread; runs from `start` to `stop`."""

    def __init__(self, endpoint: str, spec: NamespaceSpec, seed: int):
        self.tally = Tally()
        self._endpoint = endpoint
        self._spec = spec
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"load of {endpoint}")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        namespace: Namespace | None = None
        retry_at = 0.0
        prompts: list[int] = []
        with Client(ClientConfig(self._endpoint, timeout_ms=CALL_MS, data_timeout_ms=CALL_MS)) as client:
            while not self._stopping.wait(THINK_S):
                started, hits = time.monotonic(), 0
                # Each round asks for every prompt once: from the second on, all that a pool has kept are hits.
                prompts = prompts or self._random.sample(range(PROMPTS), PROMPTS)
                prompt = prompts.pop()
                try:
                    try:
                        if namespace is None and started >= retry_at:
                            namespace = client.open_namespace(self._spec)
                        if namespace is not None:
                            hits = self._request(client, namespace, prompt)
                    except KVPoolError:
                        namespace, retry_at = None, time.monotonic() + AWAY_S
                except Exception as error:
                    self.tally.failed.append(f"{type(error).__name__}: {error}")
                ended = time.monotonic()
                if ended - started > MAX_REQUEST_S:
                    self.tally.failed.append(f"a request took {ended - started:.1f} s")
                self.tally.served.append((ended, hits))

    def _request(self, client: Client, namespace: Namespace, prompt: int) -> int:
        """Returns how many blocks were hit. Raises KVPoolError; the blocks are computed then."""
        run = BlockRun(0, [block_hash((prompt, nth)) for nth in range(BLOCKS)])
        nbytes = namespace.group(0).slot_bytes
        found = client.rpc.lookup_async(namespace, [run], wait_ms=WAIT_MS).result(CALL_MS / 1000)
        hits = 0 if found is None else found.hits[0].num_leading
        if found is not None and hits:
            self._load(client, namespace, found.lease_id, run, hits, nbytes, prompt)
        if hits < BLOCKS:
            rest = BlockRun(0, run.block_hashes[hits:], run.block_hashes[hits - 1] if hits else b"")
            blocks = [payload((prompt, nth), nbytes) for nth in range(hits, BLOCKS)]
            self._guarded("store", lambda: client.put_blocks(namespace, rest, blocks))
        return hits

    def _load(
        self, client: Client, namespace: Namespace, lease_id: int, run: BlockRun, hits: int, nbytes: int, prompt: int
    ) -> None:
        received = [np.empty(nbytes, np.uint8) for _ in range(hits)]
        part = BlockRun(0, run.block_hashes[:hits])
        self._guarded("load", lambda: client.get(namespace, lease_id, [part], InPlace(received)))
        client.rpc.release_quietly(lease_id)
        for nth, block in enumerate(received):
            assert (block == payload((prompt, nth), nbytes)).all(), f"block {nth} of prompt {prompt} has wrong bytes"

    def _guarded(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except (DrainingError, OutOfSpaceError):
            raise  # Refused before it was granted anything.
        except KVPoolError as error:
            self.tally.lost.append(f"{what}: {type(error).__name__}: {error}")
            raise
