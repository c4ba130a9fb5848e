"""Stores of the scheduler's side: which blocks each step completes, which of them are offered to the pool, and which
the engine must not reuse until every rank has reported their store.

The scheduler's thread alone calls it. Invariant: every job that `build` returns is in `_storing` and pinned until the
ranks of all stages have reported it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from vllm_plugin.boundary import Reach
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.events import Events
from vllm_plugin.groups import Group
from vllm_plugin.known import Known
from vllm_plugin.lookups import block_run
from vllm_plugin.metadata import GroupBlocks, StoreJob, WorkerMetadata
from vllm_plugin.metrics import Recorder
from vllm_plugin.pins import Pins
from vllm_plugin.retention import Retention

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.request import Request


@dataclass(slots=True)
class Tracked:
    """A request that has blocks.

    Args:
        stored: of each group, blocks [0, n) are in the pool, or on their way there, or not worth it.
        junction: see `Retention`.
        may_store: False where its KV is not known to be that of its tokens.
    """

    request: Request
    stored: list[int]
    junction: int = 0
    may_store: bool = True


class Stores:
    """Those of one engine.

    Args:
        alignment, hash_tokens: of boundaries and of block hashes, in tokens.
        num_ranks: ranks that report each job.
        num_blocks: of the engine's KV cache.
        events: told of every job that all ranks have stored.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        alignment: int,
        hash_tokens: int,
        config: ConnectorConfig,
        num_ranks: int,
        num_blocks: int,
        recorder: Recorder,
        events: Events,
    ):
        self._groups = groups
        self._alignment = alignment
        self._hash_tokens = hash_tokens
        self._store_decoded = config.store_decoded
        self._interval = -(-config.window_interval_tokens // alignment) * alignment
        self._recorder = recorder
        self._events = events
        self._known = Known()
        self._num_ranks = num_ranks
        self._pins = Pins(num_ranks, int(num_blocks * config.max_pinned_fraction))
        self._weights_epoch = config.weights_epoch
        self._tracked: dict[str, Tracked] = {}
        self._storing: dict[int, tuple[Request, StoreJob]] = {}
        self._failed: set[int] = set()  # Jobs that one rank has failed and another has yet to report.
        self._job_ids = itertools.count(1)

    def bind(self, block_pool: BlockPool) -> None:
        self._pins.bind(block_pool)

    @property
    def has_pinned_blocks(self) -> bool:
        return len(self._pins) > 0

    def nothing_in_use(self) -> bool:
        """Whether no block of the engine has a reference, pins included."""
        return self._pins.nothing_in_use()

    def only_pins_in_use(self) -> bool:
        """Whether no block of the engine has a reference but those of stores under way."""
        return self._pins.nothing_else_in_use()

    def held(self) -> dict[str, int]:
        """What is kept, by name; see `KVPoolScheduler.held`."""
        return {
            "jobs": len(self._pins),
            "pinned blocks": self._pins.num_blocks,
            "requests": len(self._tracked),
        }

    # A request, from its first blocks on

    def track(self, request: Request, junction: int | None = None) -> None:
        """A request has been given blocks. Tracking it again changes its junction alone, where one is given.

        Args:
            junction: see `Retention`.
        """
        tracked = self._tracked.setdefault(request.request_id, Tracked(request, [0] * len(self._groups)))
        if junction is not None:
            tracked.junction = junction

    def request(self, request_id: str) -> Request | None:
        """The tracked request of this id."""
        tracked = self._tracked.get(request_id)
        return None if tracked is None else tracked.request

    def loads(self, request_id: str, start_tokens: int, stop_tokens: int) -> None:
        """A tracked request loads tokens [start, stop): the pool has their blocks."""
        stored = self._tracked[request_id].stored
        for idx, group in enumerate(self._groups):
            first, stop = start_tokens // group.rule.block_tokens, stop_tokens // group.rule.block_tokens
            if stored[idx] >= first:
                stored[idx] = max(stop, stored[idx])

    def load_failed(self, request_id: str) -> None:
        """A request is computed from its first token on: all its blocks are offered again."""
        if request_id in self._tracked:
            self._tracked[request_id].stored = [0] * len(self._groups)

    def forget(self, request_id: str) -> None:
        """A request has ended. Its jobs hold references of their own."""
        self._tracked.pop(request_id, None)

    def with_blocks(self) -> list[str]:
        """Requests that are scheduled, or about to be; not those that wait for a load of theirs."""
        return [
            request_id
            for request_id, tracked in self._tracked.items()
            if tracked.request.status == RequestStatus.RUNNING
        ]

    def forbid(self, request_id: str) -> None:
        """A request stores nothing until it is allowed to again."""
        if request_id in self._tracked:
            self._tracked[request_id].may_store = False

    def allow(self, request_id: str) -> None:
        if request_id in self._tracked:
            self._tracked[request_id].may_store = True

    def cancel(self, job: StoreJob) -> None:
        """A job that no rank has been given is dropped; its blocks are offered again."""
        request, _ = self._storing.pop(job.job_id)
        self._pins.report(job.job_id, self._num_ranks)
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        for part in job.groups:
            tracked.stored[part.group_idx] = min(tracked.stored[part.group_idx], *part.firsts)

    def missing(self, group_idx: int, block_hashes: Iterable[bytes]) -> None:
        """Blocks are not in the pool."""
        self._known.missing(group_idx, block_hashes)

    def leave(self, weights_epoch: str) -> None:
        """The engine has moved to the namespace of another weights epoch, in which none of its blocks are."""
        self._weights_epoch = weights_epoch
        self._known.forget_all()
        for tracked in self._tracked.values():
            tracked.stored = [0] * len(self._groups)

    # A step

    def build(self, output: SchedulerOutput) -> list[StoreJob]:
        """This step's jobs. Their blocks are pinned from here on."""
        state = output.kv_connector_block_state
        assert state is not None, "vLLM tells a connector where blocks are"
        jobs = []
        for request_id in {**output.num_scheduled_tokens, **state.boundary_state_offloads}:
            job = self._store_job(request_id, output.num_scheduled_tokens.get(request_id, 0), state)
            if job is not None:
                jobs.append(job)
        return jobs

    def update(self, metadata: WorkerMetadata) -> None:
        """What the ranks have ended."""
        for job_id, ranks in metadata.ended_stores.items():
            self._failed |= metadata.failed_stores & {job_id}
            if self._pins.report(job_id, ranks):
                self._ended(*self._storing.pop(job_id))

    def _store_job(self, request_id: str, num_tokens: int, state: KVConnectorBlockState) -> StoreJob | None:
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.may_store:
            return None
        request = tracked.request
        # Hashes name known tokens only, and known tokens below this bound are written when this step is over: neither
        # a rejected draft token nor the last sampled one is ever stored.
        written = request.num_computed_tokens + num_tokens
        if not self._store_decoded:
            written = min(written, request.num_prompt_tokens)
        written = min(written, len(request.block_hashes) * self._hash_tokens)
        offers = state.boundary_state_offloads.get(request_id, ())
        if not offers and all(
            written // group.rule.block_tokens <= stored
            for group, stored in zip(self._groups, tracked.stored, strict=True)
            if group.rule.reach is not Reach.STATE
        ):
            return None  # Most steps of most requests: looking at the block tables would cost more than all the rest.
        tables = state.get_block_ids(request_id)
        if tables is None:
            return None
        room = self._pins.room
        groups: list[GroupBlocks] = []
        for idx, group in enumerate(self._groups):
            if group.rule.reach is Reach.STATE:
                part = self._states(request, idx, offers, written, room)
            else:
                part = self._blocks(tracked, idx, tables, written, room)
            if part is not None:
                groups.append(part)
                room -= len(part) * len(group.members)
        if not groups:
            return None
        job = StoreJob(next(self._job_ids), groups, self._weights_epoch)
        self._storing[job.job_id] = (request, job)
        self._pins.pin(job.job_id, [block_id for part in groups for row in part.block_ids for block_id in row])
        return job

    def _blocks(
        self,
        tracked: Tracked,
        idx: int,
        tables: Sequence[Sequence[int]],
        written: int,
        room: int,
    ) -> GroupBlocks | None:
        """Blocks of attention that this step completes, or that were found complete, and that are worth storing."""
        group, request, start = self._groups[idx], tracked.request, tracked.stored[idx]
        rows = [tables[member] for member in group.members]
        # An abort can leave more hashes than blocks.
        stop = min(written // group.rule.block_tokens, *map(len, rows))
        if start < request.num_computed_tokens // group.rule.block_tokens <= stop:
            # The engine had these itself. Where the pool has their last one, it was seen with all before it.
            own = request.num_computed_tokens // group.rule.block_tokens
            last = block_run(request, idx, group.rule, self._hash_tokens, own - 1, own).block_hashes[0]
            if self._known.has(last, idx):
                start = tracked.stored[idx] = own
        if stop <= start:
            return None
        if room < len(rows):
            self._recorder.add("store_deferred")
            return None
        if group.rule.reach is Reach.ALL and stop - start > room // len(rows):
            # What fits is stored now: a prompt longer than all that may be pinned would never be stored as a whole.
            self._recorder.add("store_deferred")
            stop = start + room // len(rows)
        retention = Retention(request.num_prompt_tokens, self._alignment, self._interval, tracked.junction)
        wanted = [nth for nth in retention.blocks(group.rule, start, stop) if all(row[nth] for row in rows)]
        tracked.stored[idx] = stop
        if len(wanted) * len(rows) > room:
            self._recorder.add("store_deferred")
            fitting = room // len(rows)
            tracked.stored[idx] = wanted[fitting]
            wanted = wanted[:fitting]
        if not wanted:
            return None
        return self._named(request, idx, wanted, [[row[nth] for nth in wanted] for row in rows])

    def _states(
        self,
        request: Request,
        idx: int,
        offers: Sequence[tuple[int, int, int]],
        written: int,
        room: int,
    ) -> GroupBlocks | None:
        """States that the engine hands over, with the boundary each belongs to: its block table does not tell."""
        group = self._groups[idx]
        at: dict[int, dict[int, int]] = {}
        for member, block_id, boundary in offers:
            if member in group.members and boundary <= written and boundary % group.rule.block_tokens == 0:
                at.setdefault(boundary, {})[member] = block_id
        whole = sorted(boundary for boundary, blocks in at.items() if len(blocks) == len(group.members))
        whole = whole[: room // len(group.members)]
        if not whole:
            return None
        wanted = [boundary // group.rule.block_tokens - 1 for boundary in whole]
        block_ids = [[at[boundary][member] for boundary in whole] for member in group.members]
        return self._named(request, idx, wanted, block_ids)

    def _named(self, request: Request, idx: int, wanted: Sequence[int], block_ids: list[list[int]]) -> GroupBlocks:
        """Blocks of a request with their names, by stretches without a gap."""
        runs, firsts = [], []
        for _, stretch in itertools.groupby(enumerate(wanted), key=lambda pair: pair[1] - pair[0]):
            blocks = [block for _, block in stretch]
            rule = self._groups[idx].rule
            runs.append(block_run(request, idx, rule, self._hash_tokens, blocks[0], blocks[-1] + 1))
            firsts.append(blocks[0])
        return GroupBlocks(idx, runs, block_ids, firsts)

    def _ended(self, request: Request, job: StoreJob) -> None:
        if job.job_id in self._failed:
            self._failed.remove(job.job_id)
        elif job.weights_epoch == self._weights_epoch:  # Else it is in a namespace that the engine has left.
            self._events.stored(request, job)
            self._known.stored(job)
