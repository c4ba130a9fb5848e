"""One other server: which blocks it has, and their bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvpool.client.block_io import InPlace
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.rpc import Namespace
from kvpool.protocol import replies
from kvpool.protocol.errors import (
    BusyError,
    DrainingError,
    KVPoolError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvpool.protocol.namespace import OWN, Release, check_skew
from kvpool.protocol.types import BlockRun, LeasedSlots, Lookup, RunHits, Slots
from kvpool.transport.base import Transport
from kvpool.transport.mover import Movers
from kvpool_server.cache.entry import Group
from kvpool_server.tiers.tier import BlockKey, Prompt, keys_of

BATCH_BLOCKS = 1_024
"""Of a complaint about blocks whose bytes are wrong."""


@dataclass(frozen=True, slots=True)
class LeasedRun:
    """Blocks of one group that a peer has leased to this server.

    Args:
        namespace: as the peer has it.
        lease_id: 0 if they are not leased; `slots` are empty then.
        indices: of each block among those that were asked for, its place among those that are leased.
    """

    namespace: Namespace
    group_idx: int
    lease_id: int
    slots: LeasedSlots
    indices: dict[bytes, int]


class Peer:
    """Its methods block for as long as the deadlines of `config` allow; threads may call them at once.

    Args:
        movers: processes that read into this server's arena; None: this process does.

    Raises (every method): KVPoolError.
    """

    def __init__(self, config: ClientConfig, movers: Movers | None = None):
        self._client, self._movers = Client(config), movers
        self._lock = threading.Lock()
        self._reached: tuple[Transport, int, int] | None = None  # Its boot token, and the size of its arena.

    def close(self) -> None:
        """Calls in flight fail. Idempotent."""
        self._client.close()

    def ping(self) -> int:
        """The peer's boot token. The memory of a peer of this host that is gone is unmapped: its successor needs it."""
        try:
            return replies.offer(self._client.rpc.ping()).boot_token
        except UnavailableError:
            with self._lock:
                self._reached = None
                self._client.attachment.detach()
            raise

    def find(self, group: Group, block_hashes: Sequence[bytes], lease: bool) -> LeasedRun | None:
        """Those of some blocks that lie in the peer's memory, leased if so wanted; None: none does."""
        run = BlockRun(group.idx, block_hashes)
        looked = self._look(group, [run], lease=lease, locate=lease)
        return None if looked is None else self._run(looked[0], run, looked[1], lease)

    def _look(self, group: Group, runs: Sequence[BlockRun], **wanted: bool) -> tuple[Namespace, Lookup] | None:
        """The namespace as the peer has it, and the answer; None if it has none. A restarted peer is reached anew."""
        was_reached = self._reached is not None
        try:
            there = self._namespace(group)
            return there, self._client.rpc.lookup(there, runs, prefix_only=False, here=True, **wanted)
        except UnknownNamespaceError:
            return None
        except (BusyError, DrainingError):
            raise
        except KVPoolError as error:
            with self._lock:
                self._reached = None  # It may have been restarted.
            if not was_reached or not isinstance(error, UnavailableError):
                raise
        return self._look(group, runs, **wanted)

    def read(self, leased: LeasedRun, block_hashes: Sequence[bytes], into: Sequence[memoryview]) -> list[Sequence[int]]:
        """Reads neighbours among leased blocks, verified; returns the checksums of each one's chunks.

        Args:
            into: a destination for each: uint8 [slot_bytes], contiguous.
        """
        start = leased.slots.start + leased.indices[block_hashes[0]]
        slots = replace(leased.slots, start=start, stop=start + len(block_hashes))
        run = BlockRun(leased.group_idx, block_hashes)
        arrays = InPlace([np.frombuffer(view, np.uint8) for view in into], self._movers)
        located = self._client.get(
            leased.namespace, leased.lease_id, [run], arrays, leased=slots, out_of_process=self._movers is not None
        )
        count = leased.namespace.group(leased.group_idx).num_shards
        return [located.checksums[nth * count :][:count] for nth in range(len(block_hashes))]

    def holds(self, group: Group, block_hashes: Sequence[bytes]) -> int:
        """How many of some blocks lie in the peer's memory."""
        found = self.find(group, block_hashes, lease=False)
        return 0 if found is None else len(found.indices)

    def bring_up(self, prompt: Prompt) -> tuple[set[BlockKey], int]:
        """Has the peer bring a prompt up from its own tiers, which takes longer than this call.

        Returns those that lie in its memory and, if others are on their way, when to ask again, milliseconds; else 0.
        """
        looked = self._look(next(iter(prompt)), list(prompt.values()), lease=False, bring_up=True)
        if looked is None:
            return set(), 0
        found = looked[1]
        present = {
            key
            for (group, run), hit in zip(prompt.items(), found.hits, strict=True)
            for key in keys_of(group, _complete(run, hit))
        }
        return present, found.retry_after_ms

    def release(self, lease_id: int) -> None:
        """Does not wait: a lease that the message does not reach expires."""
        self._client.rpc.release_quietly(lease_id)

    def _run(self, namespace: Namespace, run: BlockRun, found: Lookup, lease: bool) -> LeasedRun | None:
        (hits,) = found.hits
        there = _complete(run, hits)
        if not there or (lease and not found.slots):
            self.release(found.lease_id)
            return None
        places = found.slots[0] if lease else Slots(b"", b"")
        slots = LeasedSlots(places, found.fingerprint, found.boot_token, found.ends_at, 0, len(there))
        return LeasedRun(namespace, run.group_idx, found.lease_id, slots, {name: nth for nth, name in enumerate(there)})

    def _namespace(self, group: Group) -> Namespace:
        """A group's namespace on the peer, which is not opened there for it."""
        with self._lock:
            if (faster := self._client.attachment.retry()) is not None and self._reached is not None:
                self._reached = faster, *self._reached[1:]
            if self._reached is None:
                pong = replies.offer(self._client.rpc.ping())
                check_skew(OWN, Release(pong.version, pong.protocol), self._client.config.endpoint)
                transport = self._client.attachment.attach(pong)
                self._reached = transport, pong.boot_token, replies.arena_bytes(pong)
            transport, boot_token, arena_bytes = self._reached
        return Namespace(group.namespace_spec, group.fingerprint, boot_token, transport, BATCH_BLOCKS, arena_bytes)


def _complete(run: BlockRun, hits: RunHits) -> list[bytes]:
    return [name for nth, name in enumerate(run.block_hashes) if nth < hits.num_leading or hits.complete >> nth & 1]
