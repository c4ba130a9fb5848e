"""Stores of the scheduler's side: which blocks each step completes, which of them are offered to the pool, and which
the engine must not reuse until every rank has reported their store.

The scheduler's thread alone calls it. A step offers `step_blocks` blocks, and takes reports of as many, so that a long
prompt costs many steps a little; what a request has left when it finishes is pinned and offered afterwards.

Invariants:
- Every job that was made is pinned until it has ended: all ranks have reported it, or no rank was ever told of it.
- A block is offered only after a step that writes it was given to the workers (`Tracked.written`).

Shedding: where the engine lacks blocks, jobs that alone hold some are dropped. One that no rank was told of ends at
once. The ranks are told of the others: a rank that has not begun one ends it without storing it, one that has stores
it, and both report it. Until then its blocks stay pinned.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metadata import GroupBlocks, StoreJob, WorkerMetadata
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.block_names import BlockNames
from vllm_plugin.model.groups import Group
from vllm_plugin.model.hit_rules import Reach
from vllm_plugin.scheduler.block_pool import let_resets_pass
from vllm_plugin.scheduler.events import Events
from vllm_plugin.scheduler.pins import Pins
from vllm_plugin.scheduler.recent_stores import RecentStores
from vllm_plugin.scheduler.retention import Retention

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.request import Request

MIN_STEP_BLOCKS = 512
RELIEF_STEPS = 2
RELIEF_S = 0.05
"""A request that lacks blocks waits for dropped stores for so many steps, and for so long, before another one is
preempted: their report takes a step, with asynchronous scheduling two; one that has begun must end first."""


@dataclass(slots=True)
class Tracked:
    """A request that has blocks.

    Args:
        stored: of each group, blocks [0, n) are in the pool, or on their way there, or not worth it.
        divergence: see `Retention`.
        written: tokens whose KV is in the request's blocks once the steps given to the workers are done.
        due: while less is written, there is nothing to store.
        first_step: number of its first step since it was given blocks; 0 before.
        ran_at: `time.time` when that step was known to have ended: by then ranks have loaded its adapter. 0 before.
        may_store: False where its KV is not known to be that of its tokens.
    """

    request: Request
    stored: list[int]
    divergence: int = 0
    written: int = 0
    due: int = 0
    first_step: int = 0
    ran_at: float = 0.0
    may_store: bool = True


@dataclass(slots=True)
class Storing:
    """A job that has not ended.

    Args:
        is_sent: the ranks have been told of it.
        is_held: it waits for the output of a step (`PeerLoads`), and no rank has been told of it.
        dropped_at: monotonic seconds and step at which it was dropped; None if it was not.
        has_failed: a rank has reported that it did not store it.
    """

    request: Request
    job: StoreJob
    is_sent: bool = False
    is_held: bool = False
    dropped_at: tuple[float, int] | None = None
    has_failed: bool = False


class Stores:
    """Those of one engine.

    Args:
        alignment: of boundaries, in tokens.
        names: of blocks in the pool.
        num_ranks: ranks that report each job.
        num_blocks: of the engine's KV cache.
        step_tokens: that the engine computes in one step, at most.
        events: told of every job that all ranks have stored.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        alignment: int,
        names: BlockNames,
        config: ConnectorConfig,
        num_ranks: int,
        num_blocks: int,
        step_tokens: int,
        recorder: Recorder,
        events: Events,
    ):
        self._groups = groups
        self._alignment = alignment
        self._names = names
        self._store_decoded = config.store_decoded
        self._interval = -(-config.window_interval_tokens // alignment) * alignment
        self._recorder = recorder
        self._events = events
        self._recent = RecentStores()
        self._pins = Pins(num_ranks, int(num_blocks * config.max_pinned_fraction))
        self._weights_epoch = config.weights_epoch
        self._tracked: dict[str, Tracked] = {}
        self._storing: dict[int, Storing] = {}
        self._unsent: deque[StoreJob] = deque()  # Of requests that have finished.
        self._reported: deque[int] = deque()  # Jobs that all ranks have reported, still pinned.
        self._to_drop: list[int] = []  # Jobs that the next step tells the ranks to drop.
        self._job_ids = itertools.count(1)
        self._step = self._num_ended_steps = 0
        self._step_blocks = self._unpin_budget = step_blocks(groups, step_tokens)

    def bind(self, block_pool: BlockPool) -> None:
        self._pins.bind(block_pool)
        let_resets_pass(block_pool, self._pins)

    @property
    def has_pinned_blocks(self) -> bool:
        return len(self._pins) > 0

    def nothing_in_use(self) -> bool:
        """Whether no request has a block of the engine."""
        return self._pins.nothing_in_use()

    def held(self) -> dict[str, int]:
        """What is kept, by name; see `KVPoolScheduler.held`."""
        return {
            "jobs": len(self._storing),
            "pinned blocks": self._pins.num_blocks,
            "requests": len(self._tracked),
            "unsent jobs": len(self._unsent),
        }

    # A request, from its first blocks on

    def track(self, request: Request, divergence: int | None = None) -> None:
        """A request has been given blocks, for the first time or again.

        Args:
            divergence: see `Retention`; None: as before.
        """
        tracked = self._tracked.setdefault(request.request_id, Tracked(request, [0] * len(self._groups)))
        tracked.written = tracked.first_step = tracked.due = 0  # These may be other blocks than before.
        tracked.ran_at = 0.0
        if divergence is not None:
            tracked.divergence = divergence

    def request(self, request_id: str) -> Request | None:
        """The tracked request of this id."""
        tracked = self._tracked.get(request_id)
        return None if tracked is None else tracked.request

    def proven(self, request_id: str, group_idx: int, num_blocks: int) -> None:
        """The pool has block `num_blocks - 1` of a group: none of those up to it is offered.

        That is no proof for those before it. But stores begin at the front, the pool evicts the deepest block of a
        prefix first, and a block that is missing in spite of that is a miss later, with which it is offered again.
        """
        stored = self._tracked[request_id].stored
        stored[group_idx] = max(num_blocks, stored[group_idx])

    def loads(self, request_id: str, start_tokens: int, stop_tokens: int) -> None:
        """A tracked request loads tokens [start, stop): the pool has their blocks."""
        stored = self._tracked[request_id].stored
        for idx, group in enumerate(self._groups):
            first, stop = start_tokens // group.rule.block_tokens, stop_tokens // group.rule.block_tokens
            # Of a window the pool may have what this load needs, and nothing before it.
            if stored[idx] >= first or group.rule.reach is Reach.ALL:
                stored[idx] = max(stop, stored[idx])

    def load_failed(self, request_id: str) -> None:
        """A request is computed from its first token on: all its blocks are offered again."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.stored = [0] * len(self._groups)
            tracked.written = tracked.due = 0

    def finish(self, request_id: str, tables: Sequence[Sequence[int]] | None) -> None:
        """A request has ended; its jobs hold references of their own.

        Args:
            tables: its block tables, to store what the bound of its steps has left; None: nothing more is stored.
        """
        tracked = self._tracked.pop(request_id, None)
        if tracked is None or tables is None or not tracked.may_store or not self._is_adapter_sure(tracked):
            return
        while (job := self._job(tracked, tables, (), self._step_blocks)) is not None:
            self._unsent.append(job)

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
            tracked = self._tracked[request_id]
            tracked.may_store, tracked.written = False, 0

    def allow(self, request_id: str) -> None:
        if request_id in self._tracked:
            self._tracked[request_id].may_store = True

    def hold(self, job: StoreJob, is_held: bool = True) -> None:
        """A job of a step is not given to the ranks yet, or is given to them now."""
        storing = self._storing[job.job_id]
        storing.is_held, storing.is_sent = is_held, not is_held

    def cancel(self, job: StoreJob) -> None:
        """A job that no rank has been given is dropped; its blocks are offered again."""
        request = self._storing.pop(job.job_id).request
        self._pins.unpin(job.job_id)
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.due = 0
        for part in job.groups:
            tracked.stored[part.group_idx] = min(tracked.stored[part.group_idx], *part.firsts)

    def drop_unsent(self) -> None:
        """Drops what requests have left that have finished, and that no rank has been told of."""
        for job in list(self._unsent):
            self._drop(self._storing[job.job_id])

    def missing(self, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        """Blocks are not in the pool."""
        self._recent.missing(group_idx, block_hashes)

    def leave(self, weights_epoch: str) -> None:
        """The engine has moved to the namespace of another weights epoch, in which none of its blocks are."""
        self._weights_epoch = weights_epoch
        self._recent.forget_all()
        for tracked in self._tracked.values():
            tracked.stored, tracked.due = [0] * len(self._groups), 0
        self.drop_unsent()

    # A step

    def build(self, output: SchedulerOutput, may_store: bool) -> tuple[list[StoreJob], list[int]]:
        """This step's jobs, whose blocks are pinned from here on, and those that the ranks are to drop."""
        self._step += 1
        self._unpin_reported()
        self._unpin_budget = self._step_blocks
        jobs: list[StoreJob] = []
        if may_store:
            budget = self._step_blocks
            while self._unsent and budget > 0:
                jobs.append(self._unsent.popleft())
                budget -= jobs[-1].num_blocks
            jobs += self._new_jobs(output, budget)
        else:
            self.drop_unsent()
        for job in jobs:
            self._storing[job.job_id].is_sent = True
        to_drop, self._to_drop = self._to_drop, []
        return jobs, to_drop

    def step_ended(self) -> None:
        """The oldest step that had not ended has. Each that was built is ended once, in order."""
        self._num_ended_steps += 1

    def update(self, metadata: WorkerMetadata) -> None:
        """What the ranks have ended."""
        for job_id, ranks in metadata.ended_stores.items():
            self._storing[job_id].has_failed |= job_id in metadata.failed_stores
            if self._pins.report(job_id, ranks):
                self._reported.append(job_id)
        self._unpin_reported()

    # The engine lacks blocks

    def make_room(self, num_blocks: int) -> None:
        """A request that is to be admitted needs so many blocks: drops what alone holds some, if they are not free."""
        if len(self._pins) and self._pins.num_free_blocks < num_blocks:
            self._drop_orphans()

    def relieve(self) -> bool:
        """A running request lacks blocks; True if it should wait for dropped stores rather than preempt another."""
        if not len(self._pins):
            return False
        freed = bool(self._reported)
        while self._reported:
            self._unpin(self._reported.popleft())
        if self._drop_orphans() or freed:
            return True
        now = time.monotonic()
        return any(
            now - storing.dropped_at[0] < RELIEF_S or self._step - storing.dropped_at[1] < RELIEF_STEPS
            for storing in self._storing.values()
            if storing.dropped_at is not None
        )

    def _drop_orphans(self) -> bool:
        """Drops the jobs that alone keep blocks from reuse; False if there is none that was not dropped before."""
        orphans = [
            storing
            for job_id, storing in self._storing.items()
            if storing.dropped_at is None and not storing.is_held and self._pins.holds_alone(job_id)
        ]
        for storing in orphans:
            self._drop(storing)
        return bool(orphans)

    def _drop(self, storing: Storing) -> None:
        job = storing.job
        storing.dropped_at = time.monotonic(), self._step
        if storing.is_sent:
            self._to_drop.append(job.job_id)
            return
        self._unsent.remove(job)
        self._recorder.add("store_dropped_blocks", job.num_blocks)
        storing.has_failed = True
        self._unpin(job.job_id)

    # Jobs

    def _new_jobs(self, output: SchedulerOutput, budget: int) -> list[StoreJob]:
        state = output.kv_connector_block_state
        assert state is not None, "vLLM tells a connector where blocks are"
        jobs = []
        scheduled, offloads = output.num_scheduled_tokens, state.boundary_state_offloads
        for request_id in {**scheduled, **offloads}:
            tracked, num_tokens = self._tracked.get(request_id), scheduled.get(request_id, 0)
            if tracked is None:
                continue
            if tracked.request.num_computed_tokens + num_tokens < tracked.due and request_id not in offloads:
                continue  # Most steps of most requests.
            job = self._store_job(tracked, num_tokens, state, budget)
            if job is not None:
                jobs.append(job)
                budget -= job.num_blocks
        return jobs

    def _store_job(
        self, tracked: Tracked, num_tokens: int, state: KVConnectorBlockState, budget: int
    ) -> StoreJob | None:
        request, request_id = tracked.request, tracked.request.request_id
        # vLLM counts tokens of a streaming session as computed that are not, where an answer has ended among accepted
        # drafts or while the request was preempted. Stored, their blocks would be wrong under right names.
        if request.resumable or not tracked.may_store:
            return None
        # Hashes name known tokens only, and known tokens below this bound are written when this step is over: neither
        # a rejected draft token nor the last sampled one is ever stored.
        written = request.num_computed_tokens + num_tokens
        if not self._store_decoded:
            written = min(written, request.num_prompt_tokens)
        tracked.written = written = min(written, len(request.block_hashes) * self._names.hash_tokens)
        if not self._is_adapter_sure(tracked):
            return None
        offers = state.boundary_state_offloads.get(request_id, ())
        if not offers and not self._has_more(tracked):
            tracked.due = self._due(tracked)
            return None
        if min(budget, self._pins.room) <= 0:
            if self._pins.room <= 0:
                self._recorder.add("deferred_stores")
            return None
        tables = state.get_block_ids(request_id)
        return None if tables is None else self._job(tracked, tables, offers, budget)

    def _is_adapter_sure(self, tracked: Tracked) -> bool:
        """Whether the ranks must have the adapter that names the request's blocks, if it has one.

        Its files were looked at after a step of the request had ended, and so after the ranks had loaded them.
        """
        if tracked.request.lora_request is None:
            return True
        tracked.first_step = tracked.first_step or self._step
        if not tracked.ran_at:
            if self._num_ended_steps < tracked.first_step:
                return False
            tracked.ran_at = time.time()
        return self._names.are_known(tracked.request) and self._names.are_checked(tracked.request, tracked.ran_at)

    def _job(
        self,
        tracked: Tracked,
        tables: Sequence[Sequence[int]],
        offers: Sequence[tuple[int, int, int]],
        budget: int,
    ) -> StoreJob | None:
        """A job of at most `budget` blocks, pinned; None if there is nothing to store, or no room."""
        room = min(budget, self._pins.room)
        parts: list[GroupBlocks] = []
        for idx, group in enumerate(self._groups):
            if group.rule.reach is Reach.STATE:
                part = self._states(tracked, idx, offers, room)
            else:
                part = self._blocks(tracked, idx, tables, room)
            if part is not None:
                parts.append(part)
                room -= part.num_blocks
        if self._pins.room < budget and self._has_more(tracked):
            self._recorder.add("deferred_stores")
        if not parts:
            return None
        job = StoreJob(next(self._job_ids), parts, self._weights_epoch, self._names.adapter(tracked.request))
        self._storing[job.job_id] = Storing(tracked.request, job)
        self._pins.pin(job.job_id, [row for part in parts for row in part.block_ids])
        return job

    def _has_more(self, tracked: Tracked) -> bool:
        """Whether blocks of attention are complete that have not been offered."""
        return any(
            tracked.written // group.rule.block_tokens > stored
            for group, stored in zip(self._groups, tracked.stored, strict=True)
            if group.rule.reach is not Reach.STATE
        )

    def _due(self, tracked: Tracked) -> int:
        """How many tokens must be written for the next block of attention to be complete."""
        return min(
            (
                (stored + 1) * group.rule.block_tokens
                for group, stored in zip(self._groups, tracked.stored, strict=True)
                if group.rule.reach is not Reach.STATE
            ),
            default=0,
        )

    def _blocks(self, tracked: Tracked, idx: int, tables: Sequence[Sequence[int]], room: int) -> GroupBlocks | None:
        """Blocks of attention that this step completes, or that were found complete, and that are worth storing."""
        group, request, start = self._groups[idx], tracked.request, tracked.stored[idx]
        rows = [tables[member] for member in group.members]
        # An abort can leave more hashes than blocks.
        stop = min(tracked.written // group.rule.block_tokens, *map(len, rows))
        if start < request.num_computed_tokens // group.rule.block_tokens <= stop:
            # The engine had these itself. Where the pool has their last one, it was seen with all before it.
            own = request.num_computed_tokens // group.rule.block_tokens
            last = self._names.run(request, idx, group.rule, own - 1, own).block_hashes[0]
            if self._recent.has(last, idx):
                start = tracked.stored[idx] = own
        if stop <= start:
            return None
        most = room // len(rows)
        if group.rule.reach is Reach.ALL:
            # What fits is stored now: a prompt longer than all that may be pinned would never be stored as a whole.
            fitting = min(stop, start + most)
            wanted: Sequence[int] = range(start, fitting)
            tracked.stored[idx] = fitting
            if any(0 in row[start:fitting] for row in rows):
                wanted = [nth for nth in wanted if all(row[nth] for row in rows)]
        else:
            retention = Retention(request.num_prompt_tokens, self._alignment, self._interval, tracked.divergence)
            wanted = [nth for nth in retention.blocks(group.rule, start, stop) if all(row[nth] for row in rows)]
            tracked.stored[idx] = wanted[most] if len(wanted) > most else stop
            wanted = wanted[:most]
        return self._named(request, idx, wanted, [_picked(row, wanted) for row in rows]) if wanted else None

    def _states(
        self, tracked: Tracked, idx: int, offers: Sequence[tuple[int, int, int]], room: int
    ) -> GroupBlocks | None:
        """States that the engine hands over, with the boundary each belongs to: its block table does not tell."""
        group = self._groups[idx]
        at: dict[int, dict[int, int]] = {}
        for member, block_id, boundary in offers:
            if member in group.members and boundary <= tracked.written and boundary % group.rule.block_tokens == 0:
                at.setdefault(boundary, {})[member] = block_id
        whole = sorted(boundary for boundary, blocks in at.items() if len(blocks) == len(group.members))
        whole = whole[: room // len(group.members)]
        if not whole:
            return None
        wanted = [boundary // group.rule.block_tokens - 1 for boundary in whole]
        block_ids = [[at[boundary][member] for boundary in whole] for member in group.members]
        return self._named(tracked.request, idx, wanted, block_ids)

    def _named(self, request: Request, idx: int, wanted: Sequence[int], block_ids: list[list[int]]) -> GroupBlocks:
        """Blocks of a request with their names, by stretches without a gap."""
        rule = self._groups[idx].rule
        stretches = [(wanted[0], wanted[-1] + 1)] if isinstance(wanted, range) else list(_stretches(wanted))
        runs = [self._names.run(request, idx, rule, first, stop) for first, stop in stretches]
        return GroupBlocks(idx, runs, block_ids, [first for first, _ in stretches])

    # Reports

    def _unpin_reported(self) -> None:
        """Takes reports of `step_blocks` blocks in one step; the next step takes the others."""
        while self._reported and self._unpin_budget > 0:
            self._unpin_budget -= self._unpin(self._reported.popleft())

    def _unpin(self, job_id: int) -> int:
        """A job has ended. Returns how many blocks are free of it."""
        storing = self._storing.pop(job_id)
        num_blocks = self._pins.unpin(job_id)
        if storing.has_failed:
            if storing.is_sent and storing.dropped_at is not None:
                self._recorder.add("store_dropped_blocks", num_blocks)
        elif storing.job.weights_epoch == self._weights_epoch:  # Else it is in a namespace that the engine has left.
            self._events.stored(storing.request, storing.job)
            self._recent.stored(storing.job)
        return num_blocks


def step_blocks(groups: Sequence[Group], step_tokens: int) -> int:
    """How many blocks a step may offer: no fewer than it completes, or an engine that only prefills would lose some."""
    return max(MIN_STEP_BLOCKS, sum(step_tokens // group.rule.block_tokens * len(group.members) for group in groups))


def _picked(row: Sequence[int], wanted: Sequence[int]) -> list[int]:
    if isinstance(wanted, range):
        return list(row[wanted.start : wanted.stop])
    return [row[nth] for nth in wanted]


def _stretches(wanted: Sequence[int]) -> Iterable[tuple[int, int]]:
    """[start, stop) of each stretch without a gap."""
    for _, stretch in itertools.groupby(enumerate(wanted), key=lambda pair: pair[1] - pair[0]):
        blocks = [block for _, block in stretch]
        yield blocks[0], blocks[-1] + 1
