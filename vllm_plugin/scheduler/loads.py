"""Loads of the scheduler's side: which hits are worth it, which the engine has room for, and which are under way."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metadata import GroupBlocks, LoadJob, own_clock
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.groups import Geometry
from vllm_plugin.scheduler.load_policy import Connection, Load, LoadPolicy, PrefillQueue
from vllm_plugin.scheduler.lookups import RequestLookup
from vllm_plugin.scheduler.stages import Stages

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_WAIT_BETWEEN_ASKS_S = 1.0
"""A request that waits for room asks at every step in which vLLM admits requests; one that has not asked for so long
does not keep others from loading."""


@dataclass
class Loading(Load):
    """A load under way, and how many of the engine's blocks its request needs if the load fails."""

    job: LoadJob
    num_blocks: int


class Loads:
    """Judges hits, and keeps account of an engine's loads from their begin to the last rank's report."""

    def __init__(
        self, geometry: Geometry, stages: Stages, config: ConnectorConfig, queue: PrefillQueue, recorder: Recorder
    ):
        self._recorder = recorder
        self._geometry = geometry
        self._stages = stages
        self._decline = config.decline_slow_loads
        self.loading: dict[str, Loading] = {}  # Under way, by request id.
        self.new: list[LoadJob] = []  # The ranks have yet to be given these.
        self._waiting_first = ""
        self._waiting_at = 0.0
        self.policy = LoadPolicy(recorder, queue, self.loading, config.load_timeout_ms / 1_000)

    # A hit

    def verdict(self, request_id: str, start: int, stop: int) -> int:
        """How many tokens of a hit are worth loading, from token `start` to boundary `stop`."""
        if not self._decline:
            return stop - start
        return self.policy.verdict(request_id, stop - start, self._nbytes(start, stop), self._connection)

    def compute_seconds(self, num_tokens: int) -> float:
        """What computing so many tokens takes; infinite while unknown, and where no load is declined."""
        return self.policy.compute_seconds(num_tokens) if self._decline else math.inf

    def has_room(self, request: Request) -> bool:
        """Whether all loads could fail, with this one, and every request still find its blocks.

        vLLM computes the first request whose load failed before it looks at the next. If that one needs more blocks
        than it had (what lies before a window is not loaded, but computed) and other requests that load hold the rest,
        none of them ever frees its blocks. A request that is refused waits first: others, with smaller loads, would
        overtake it for ever.
        """
        now = time.monotonic()
        if self._waiting_first not in ("", request.request_id) and now - self._waiting_at < MAX_WAIT_BETWEEN_ASKS_S:
            return False
        loading = sum(load.num_blocks for load in self.loading.values())
        needed = self._geometry.blocks_to_compute(request.num_tokens)
        has_room = not loading or loading + needed < self._geometry.num_blocks
        self._waiting_first, self._waiting_at = "" if has_room else request.request_id, now
        return has_room

    def stop_waiting(self, request_id: str) -> None:
        if self._waiting_first == request_id:
            self._waiting_first = ""

    # A load

    def begin(
        self,
        request: Request,
        lookup: RequestLookup,
        tables: Sequence[Sequence[int]],
        start: int,
        stop: int,
        traceparent: str = "",
    ) -> bool:
        """A load of tokens [start, stop), those beyond the engine's own, goes to the ranks with this step.

        `tables` has the request's block ids, one row for each of the engine's groups.

        Returns: False if the pool lacks blocks that vLLM has allocated: it takes the hit in part, up to a boundary that
            cannot be resumed. Such a load has no leases, so it fails, and all is computed.
        """
        parts = self.parts(request, lookup, tables, start, stop)
        job = self._new(request.request_id, parts, lookup.lease_ids, traceparent)
        nbytes, num_blocks = self._nbytes(start, stop), self._geometry.blocks_to_compute(request.num_tokens)
        loading = Loading(time.monotonic(), stop - start, nbytes, self._connection, job, num_blocks)
        self.loading[job.request_id] = loading
        return parts is not None

    def fail(self, request_id: str) -> list[tuple[int, ...]]:
        """Every rank reports the load of a request as failed. Returns the leases of what it replaces, one a stage."""
        replaced = [job.lease_ids for job in self.new if job.request_id == request_id]
        self.new = [job for job in self.new if job.request_id != request_id]
        self._new(request_id, None)
        return replaced

    def take_new(self) -> list[LoadJob]:
        new, self.new = self.new, []
        return new

    def _new(
        self, request_id: str, parts: list[GroupBlocks] | None, lease_ids: tuple[int, ...] = (), traceparent: str = ""
    ) -> LoadJob:
        if parts is None:
            parts, lease_ids = [], (0,) * self._geometry.num_stages
        job = LoadJob(request_id, lease_ids, parts, self._stages.weights_epoch, own_clock(), traceparent=traceparent)
        self.new.append(job)
        return job

    def parts(
        self, request: Request, lookup: RequestLookup, tables: Sequence[Sequence[int]], start: int, stop: int
    ) -> list[GroupBlocks] | None:
        """Blocks of tokens [start, stop) to load; None if the pool lacks some of those that vLLM has allocated."""
        names = self._geometry.names
        if not names.are_known(request):
            return None
        parts = []
        for idx, group in enumerate(self._geometry.groups):
            first, end = start // group.kind.block_tokens, -(-stop // group.kind.block_tokens)
            rows = [list(tables[member][first:end]) for member in group.members]
            # Before a window the table has the null block, which is never written.
            num_null = next((nth for nth, ids in enumerate(zip(*rows, strict=True)) if all(ids)), end - first)
            rows = [row[num_null:] for row in rows] if num_null else rows
            first += num_null
            if not all(all(row) for row in rows) or not lookup.found[idx].has(first, end):
                return None
            if rows[0]:
                run = names.run(request, idx, group.kind, first, end)
                parts.append(GroupBlocks(idx, [run], rows, [first], lookup.leased(idx, first, end)))
        return parts

    def transferred(self, seconds: Mapping[str, float], unserved: Collection[str] = ()) -> None:
        """How long ranks have taken for the loads of requests, and which of them the pool has not served."""
        for request_id, transfer_s in seconds.items():
            if (load := self.loading.get(request_id)) is not None:
                load.job.seconds = max(load.job.seconds, transfer_s)
                load.job.is_unserved |= request_id in unserved

    def ended(self, request_id: str, succeeded: bool) -> LoadJob | None:
        """Every rank has reported a request's load; None if there is none."""
        load = self.loading.pop(request_id, None)
        if load is None:
            return None
        seconds = time.monotonic() - load.began_at
        self._recorder.add("load_seconds", seconds)
        self._recorder.add("loaded_tokens", load.num_tokens if succeeded else 0)
        self.policy.load_ended(load, load.job.seconds or seconds, succeeded)
        return load.job

    @property
    def _connection(self) -> Connection:
        return Connection(self._stages.transport, self._stages.boot_token)

    def _nbytes(self, start: int, stop: int) -> int:
        """Bytes that one rank loads of a hit."""
        total = 0
        for group, spec in zip(self._geometry.groups, self._stages.specs[0].groups, strict=True):
            first = max(group.kind.first(stop), start // group.kind.block_tokens)
            total += (stop // group.kind.block_tokens - first) * spec.slot_bytes
        return total // self._geometry.tp_size
