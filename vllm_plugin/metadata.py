"""The values that the two sides of the connector exchange once a step: plain and picklable.

Jobs have ids of their own, since a preempted or repeated request comes back under the same request id.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun, LeasedSlots, in_parts
from vllm_plugin.model.adapters import NO_ADAPTER

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def own_clock() -> str:
    """Names this host's `time.monotonic`, which counts from its boot; empty if the host does not tell."""
    try:
        return BOOT_ID.read_text()
    except OSError:
        return ""


@dataclass(slots=True)
class GroupBlocks:
    """Blocks of one group, in the pool and in the engine."""

    group_idx: int  # Of the pool's group.
    runs: list[BlockRun]  # The blocks' names in the pool; the blocks of a run follow each other in a prefix.
    block_ids: list[list[int]]  # In the engine: a row for each of the group's block tables, in the order of runs.
    firsts: list[int] = field(default_factory=list)  # Index of each run's first block in its prefix.
    leased: tuple[LeasedSlots | None, ...] = ()  # Of a load, by stage: where the blocks lie, if the lookup says it.

    def __len__(self) -> int:
        return len(self.block_ids[0])

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine, over all block tables."""
        return sum(map(len, self.block_ids))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles names and block ids as one array each, which takes a sixth of the time for thousands of blocks."""
        runs = [(run.group_idx, len(run), b"".join(run.block_hashes), run.parent_hash) for run in self.runs]
        rows = [array("i", row).tobytes() for row in self.block_ids]
        return _unpickled, (self.group_idx, runs, rows, self.firsts, self.leased)

    def pieces(self, max_blocks: int) -> Iterator[tuple[int, list[BlockRun]]]:
        """Parts of at most `max_blocks` blocks, each with the position of its first block."""
        start = 0
        for part in in_parts(self.runs, max_blocks):
            yield start, part
            start += sum(map(len, part))


@dataclass(slots=True)
class LoadJob:
    """Load leased blocks from the pool into the engine."""

    request_id: str
    lease_ids: tuple[int, ...]  # One for each pipeline stage.
    groups: list[GroupBlocks]
    weights_epoch: str = ""  # Of the namespace that the job is meant for.
    clock: str = ""  # Of the host whose `time.monotonic` the ends of leases are by.
    seconds: float = 0.0  # Of the transfer alone, in the slowest rank that has reported; 0 before its end.
    traceparent: str = ""  # Of the load's span; empty if it has none.
    is_unserved: bool = False  # See `WorkerMetadata.unserved_loads`.


@dataclass(slots=True)
class StoreJob:
    """Store blocks of the engine in the pool; they stay pinned until every rank has reported the job."""

    job_id: int
    groups: list[GroupBlocks]
    weights_epoch: str = ""  # Of the namespace that the job is meant for.
    adapter: bytes = NO_ADAPTER  # Digest of the LoRA adapter that the blocks' names contain; see `adapters.named`.
    traceparent: str = ""  # Of the request's span; empty if it has none.

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine, over all groups."""
        return sum(part.num_blocks for part in self.groups)


@dataclass
class ConnectorMetadata(base.KVConnectorMetadata):
    """Scheduler to workers."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    # Ids of store jobs that a rank ends without storing them, unless the rank has begun them.
    dropped_stores: list[int] = field(default_factory=list)
    weights_epoch: str = ""  # Of the namespace that the engine is in.
    weights_check: int = 0  # Number of the check of the weights that is due; 0: none is.


@dataclass
class WorkerMetadata(base.KVConnectorWorkerMetadata):
    """Workers to scheduler."""

    ended_stores: dict[int, int] = field(default_factory=dict)  # How many ranks have ended each store job.
    failed_stores: set[int] = field(default_factory=set)  # Ids of jobs that some rank did not store.
    # Pipeline stage, and fingerprint of the namespace that a rank is in; each rank reports it once.
    namespaces: frozenset[tuple[int, bytes]] = frozenset()
    # Pipeline stage, tensor-parallel rank, number of the check (0 at the start), digest of the weights in its memory.
    weights: frozenset[tuple[int, int, int, bytes]] = frozenset()
    load_seconds: dict[str, float] = field(default_factory=dict)  # Of ended loads, without their wait for others.
    # Requests whose load has failed because a rank found the pool away, late or wrong. A lease that the engine has let
    # expire is not such a failure.
    unserved_loads: set[str] = field(default_factory=set)

    def aggregate(self, other: base.KVConnectorWorkerMetadata) -> WorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(
            dict(Counter(self.ended_stores) + Counter(other.ended_stores)),
            self.failed_stores | other.failed_stores,
            self.namespaces | other.namespaces,
            self.weights | other.weights,
            {
                request_id: max(self.load_seconds.get(request_id, 0.0), other.load_seconds.get(request_id, 0.0))
                for request_id in self.load_seconds | other.load_seconds
            },
            self.unserved_loads | other.unserved_loads,
        )


@dataclass
class Handshake(base.KVConnectorHandshakeMetadata):
    """Worker to scheduler, once: the worker's namespace, where the scheduler cannot derive it."""

    spec: NamespaceSpec


def _unpickled(
    group_idx: int,
    runs: list[tuple[int, int, bytes, bytes]],
    rows: list[bytes],
    firsts: list[int],
    leased: tuple[LeasedSlots | None, ...],
) -> GroupBlocks:
    named = [
        BlockRun(idx, np.frombuffer(names, f"V{len(names) // count}").tolist() if count else [], parent)
        for idx, count, names, parent in runs
    ]
    return GroupBlocks(group_idx, named, [array("i", row).tolist() for row in rows], firsts, leased)
