"""Which blocks each step completes, and which of them are offered to the pool.

A step offers `StoreJobs.step_blocks` blocks; what a request has left when it finishes is pinned and offered afterwards.

Invariant: a block is offered only after a step that writes it was given to the workers (`TrackedRequest.written`).
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_block_hash, make_block_hash_with_group_id

from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metadata import GroupBlocks, StoreJob
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.groups import Geometry
from vllm_plugin.model.kinds import Kind
from vllm_plugin.scheduler.pool_contents import PoolContents
from vllm_plugin.scheduler.store_jobs import StoreJobs

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.request import Request

DECODED_BLOCKS = 8
"""So many decoded blocks are stored together, and the rest when their request ends: a job costs the scheduler's thread
and the server about as much for one block as for eight."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Where later requests may resume, which decides what blocks of a request are worth storing.

    A hit needs only a part of the prefix in some groups (a sliding window: the window before the boundary). Their
    blocks are stored at the boundaries where a later request may resume: at the end of the prompt, everywhere in
    decoded tokens (the next turn of a conversation ends anywhere), where this prompt parted from one that the pool
    knows, and at every multiple of an interval for the first prompt that parts from this one.
    """

    prompt_tokens: int
    alignment: int  # Of boundaries, in tokens.
    interval: int  # Tokens between boundaries that are kept whatever the prompt; a multiple of `alignment`.
    divergence: int = 0  # Boundary where the prompt parted from what the pool knows; 0: none.

    def blocks(self, kind: Kind, start: int, stop: int) -> list[int]:
        """The blocks among [start, stop) that are worth storing, in order."""
        prompt_end = self.prompt_tokens // self.alignment * self.alignment
        # From the multiple before, which the first block may have to prove, to the one the last block leads to.
        first = start * kind.block_tokens // self.interval * self.interval
        last = -(-stop * kind.block_tokens // self.interval) * self.interval
        boundaries = [
            *range(first, last + 1, self.interval),
            self.divergence,
            # The same prompt again computes its last token; a longer one may resume after it.
            (self.prompt_tokens - 1) // self.alignment * self.alignment,
            prompt_end,
            prompt_end - self.alignment,  # The block after it proves it where a draft model asks for that.
        ]
        return kind.worth_storing(start, stop, boundaries, prompt_end // kind.block_tokens)


@dataclass(slots=True)
class TrackedRequest:
    """A request that has blocks."""

    request: Request
    stored: list[int]  # Of each group, blocks [0, n) are in the pool, or on their way there, or not worth storing.
    divergence: int = 0  # See `Retention`.
    written: int = 0  # Tokens whose KV is in the request's blocks once the steps given to the workers are done.
    due: int = 0  # How many tokens must be written before `written` is counted again.
    first_step: int = 0  # Number of its first step since it was given blocks; 0 before.
    ran_at: float = 0.0  # `time.time` when that step was known to have ended: by then ranks have loaded its adapter.
    may_store: bool = True  # False where its KV is not known to be that of its tokens.


class Stores:
    """Follows which blocks of each request are written, and offers them to the pool."""

    def __init__(
        self, geometry: Geometry, config: ConnectorConfig, jobs: StoreJobs, contents: PoolContents, recorder: Recorder
    ):
        self._groups = geometry.groups
        self._alignment = geometry.alignment
        self._names = geometry.names
        self._jobs = jobs
        self._contents = contents
        self._recorder = recorder
        self._store_decoded = config.store_decoded
        self._interval = -(-config.window_interval_tokens // geometry.alignment) * geometry.alignment
        self.tracked: dict[str, TrackedRequest] = {}  # Requests that have blocks, by id.
        self._num_ended_steps = 0

    # A request, from its first blocks on

    def track(self, request: Request, divergence: int | None = None) -> None:
        """A request has been given blocks, for the first time or again; a divergence of None is as before."""
        tracked = self.tracked.setdefault(request.request_id, TrackedRequest(request, [0] * len(self._groups)))
        tracked.written = tracked.first_step = tracked.due = 0  # These may be other blocks than before.
        tracked.ran_at = 0.0
        if divergence is not None:
            tracked.divergence = divergence

    def proven(self, request_id: str, group_idx: int, num_blocks: int) -> None:
        """The pool has block `num_blocks - 1` of a group: the blocks up to that one are not offered.

        That does not prove that the pool has those before it. But stores begin at the front, and the pool evicts the
        deepest block of a prefix first. A block that is missing even so is a later miss, and is then offered again.
        """
        stored = self.tracked[request_id].stored
        stored[group_idx] = max(num_blocks, stored[group_idx])

    def loads(self, request_id: str, start_tokens: int, stop_tokens: int) -> None:
        """A tracked request loads tokens [start, stop): the pool has their blocks."""
        stored = self.tracked[request_id].stored
        for idx, group in enumerate(self._groups):
            first, stop = start_tokens // group.kind.block_tokens, stop_tokens // group.kind.block_tokens
            # Of a window the pool may have only the blocks that this load needs, and none before them.
            if stored[idx] >= first or group.kind.needs_prefix:
                stored[idx] = max(stop, stored[idx])

    def load_failed(self, request_id: str) -> None:
        """A request is computed from its first token on: all of its blocks are offered again."""
        if (tracked := self.tracked.get(request_id)) is not None:
            tracked.stored = [0] * len(self._groups)
            tracked.written = tracked.due = 0

    def finish(self, request_id: str, tables: Sequence[Sequence[int]] | None) -> None:
        """A request has ended. With its block tables, the blocks that its steps have left are stored."""
        if (tracked := self.tracked.pop(request_id, None)) is None:
            return
        self._jobs.outlive(tracked.request)
        if tables is None or not tracked.may_store or not self._names.are_known(tracked.request):
            return
        # A short answer ends before its adapter's files have been checked.
        is_sure = None if self._is_adapter_sure(tracked) else lambda: self._is_adapter_sure(tracked)
        while (job := self._job(tracked, tables, (), self._jobs.step_blocks)) is not None:
            self._jobs.queue(job, is_sure)

    def distrust(self, request: Request) -> None:
        """A request whose blocks could not be tracked stores nothing."""
        self.tracked.setdefault(request.request_id, TrackedRequest(request, [0] * len(self._groups)))
        self.forbid(request.request_id)

    def forbid(self, request_id: str) -> None:
        """A request stores nothing until it is allowed to again."""
        if (tracked := self.tracked.get(request_id)) is not None:
            tracked.may_store, tracked.written = False, 0

    def allow(self, request_id: str) -> None:
        if request_id in self.tracked:
            self.tracked[request_id].may_store = True

    def change_epoch(self, weights_epoch: str) -> None:
        """The engine moves to the namespace of another weights epoch, in which none of its blocks are."""
        self._jobs.weights_epoch = weights_epoch
        self._contents.forget_all()
        for tracked in self.tracked.values():
            tracked.stored, tracked.due = [0] * len(self._groups), 0
        self._jobs.drop_unsent()

    # A step

    def unwritten(self, request_ids: Iterable[str], free: Sequence[KVCacheBlock]) -> set[int]:
        """Ids of the free blocks with hashes of these requests' tokens that no step may have been given to write.

        Of a request that is not tracked no hash is known: then these are all free blocks.
        """
        names: set[bytes] = set()
        for request_id in request_ids:
            tracked = self.tracked.get(request_id)
            if tracked is None:
                return {block.block_id for block in free}
            names.update(tracked.request.block_hashes[tracked.written // self._names.hash_tokens :])
        return {block.block_id for block in free if block.block_hash and get_block_hash(block.block_hash) in names}

    def build(self, output: SchedulerOutput, may_store: bool) -> list[StoreJob]:
        """This step's jobs, whose blocks are pinned from here on."""
        jobs, budget = self._jobs.new_step(may_store)
        if may_store:
            jobs += self._new_jobs(output, budget)
        if jobs:
            self._jobs.sent(jobs)
        return jobs

    def step_ended(self) -> None:
        """The oldest step that had not ended has. Each that was built is ended once, in order."""
        self._num_ended_steps += 1

    # Jobs

    def _new_jobs(self, output: SchedulerOutput, budget: int) -> list[StoreJob]:
        state = output.kv_connector_block_state
        assert state is not None, "vLLM tells a connector where blocks are"
        jobs = []
        scheduled, offloads = output.num_scheduled_tokens, state.boundary_state_offloads
        for request_id in {**scheduled, **offloads}:
            tracked, num_tokens = self.tracked.get(request_id), scheduled.get(request_id, 0)
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
        self, tracked: TrackedRequest, num_tokens: int, state: KVConnectorBlockState, budget: int
    ) -> StoreJob | None:
        request, request_id = tracked.request, tracked.request.request_id
        # Of a streaming session vLLM counts tokens as computed that are not, where an answer has ended among accepted
        # drafts or while the request was preempted. Blocks stored then would have wrong KV under right names.
        # Of a prompt of tokens and embeddings the hashes do not tell token 0 from a row of zeros.
        if request.resumable or not tracked.may_store or getattr(request, "prompt_is_token_ids", None):
            return None
        # Hashes name known tokens only, and known tokens below this bound are written when this step is over: neither
        # a rejected draft token nor the last sampled token is ever stored.
        written = request.num_computed_tokens + num_tokens
        if not self._store_decoded:
            written = min(written, request.num_prompt_tokens)
        tracked.written = written = min(written, len(request.block_hashes) * self._names.hash_tokens)
        if budget <= 0 or not self._is_adapter_sure(tracked):  # The budget first: it ends before most requests.
            return None
        offers = state.boundary_state_offloads.get(request_id, ())
        if not offers and written < self._due(tracked, DECODED_BLOCKS):
            tracked.due = (written // self._names.hash_tokens + 1) * self._names.hash_tokens
            return None
        if self._jobs.room <= 0:
            self._recorder.add("deferred_stores")
            return None
        tables = state.get_block_ids(request_id)
        return None if tables is None else self._job(tracked, tables, offers, budget)

    def _is_adapter_sure(self, tracked: TrackedRequest) -> bool:
        """Whether the ranks computed a request with the adapter that names its blocks; True without an adapter.

        The adapter's files were checked after a step of the request had ended: after the ranks had loaded them.
        """
        if tracked.request.lora_request is None:
            return True
        tracked.first_step = tracked.first_step or self._jobs.step
        if not tracked.ran_at:
            if self._num_ended_steps < tracked.first_step:
                return False
            tracked.ran_at = time.time()
        return self._names.are_known(tracked.request) and self._names.are_checked(tracked.request, tracked.ran_at)

    def _job(
        self,
        tracked: TrackedRequest,
        tables: Sequence[Sequence[int]],
        offers: Sequence[tuple[int, int, int]],
        budget: int,
    ) -> StoreJob | None:
        """A job of at most `budget` blocks, which are pinned; None if there is nothing to store, or no room."""
        room = min(budget, self._jobs.room)
        parts: list[GroupBlocks] = []
        for idx, group in enumerate(self._groups):
            if not group.kind.is_positional:
                part = self._states(tracked, idx, offers, room)
            else:
                part = self._blocks(tracked, idx, tables, room)
            if part is not None:
                parts.append(part)
                room -= part.num_blocks
        if self._jobs.room < budget and tracked.written >= self._due(tracked, decoded_blocks=1):
            self._recorder.add("deferred_stores")
        if not parts:
            return None
        return self._jobs.add(tracked.request, parts, self._names.adapter(tracked.request))

    def _due(self, tracked: TrackedRequest, decoded_blocks: int) -> int:
        """How many tokens must be written for the next job: a block of the prompt, or so many decoded ones."""
        due, prompt_tokens = sys.maxsize, tracked.request.num_prompt_tokens
        for kind, stored in zip((group.kind for group in self._groups), tracked.stored, strict=True):
            if kind.is_positional:
                # A window may free a block before the next ones are decoded.
                waits = kind.needs_prefix and (stored + 1) * kind.block_tokens > prompt_tokens
                due = min(due, (stored + (decoded_blocks if waits else 1)) * kind.block_tokens)
        return due

    def _blocks(
        self, tracked: TrackedRequest, idx: int, tables: Sequence[Sequence[int]], room: int
    ) -> GroupBlocks | None:
        """Blocks to store of a group whose block table tells positions: those complete by now and not offered yet."""
        group, request, start = self._groups[idx], tracked.request, tracked.stored[idx]
        rows = [tables[member] for member in group.members]
        # An abort can leave more hashes than blocks.
        stop = min(tracked.written // group.kind.block_tokens, *map(len, rows))
        if start < request.num_computed_tokens // group.kind.block_tokens <= stop:
            # The engine had these blocks itself. If the pool has the last of them, it was stored with all before it.
            own = request.num_computed_tokens // group.kind.block_tokens
            last = self._names.run(request, idx, group.kind, own - 1, own).block_hashes[0]
            if self._contents.was_stored(last, idx):
                start = tracked.stored[idx] = own
        if stop <= start:
            return None
        most = room // len(rows)
        if group.kind.needs_prefix:
            # A part is stored where not all fits: a prompt of more blocks than may be pinned never fits.
            fitting = min(stop, start + most)
            wanted: Sequence[int] = range(start, fitting)
            tracked.stored[idx] = fitting
            if any(0 in row[start:fitting] for row in rows):
                wanted = [nth for nth in wanted if all(row[nth] for row in rows)]
        else:
            retention = Retention(request.num_prompt_tokens, self._alignment, self._interval, tracked.divergence)
            wanted = [nth for nth in retention.blocks(group.kind, start, stop) if all(row[nth] for row in rows)]
            tracked.stored[idx] = wanted[most] if len(wanted) > most else stop
            wanted = wanted[:most]
        return self._named(request, idx, wanted, [_picked(row, wanted) for row in rows]) if wanted else None

    def _states(
        self, tracked: TrackedRequest, idx: int, offers: Sequence[tuple[int, int, int]], room: int
    ) -> GroupBlocks | None:
        """States to store: vLLM hands them over with their boundaries, which the block table does not tell.

        A state is handed over when its tokens are known, which may be before this step, and this step may have given
        its block to another request since. Then the block has lost its hash.
        """
        group, hashes = self._groups[idx], tracked.request.block_hashes
        at: dict[int, dict[int, int]] = {}
        for member, block_id, boundary in offers:
            if member in group.members and boundary <= tracked.written and boundary % group.kind.block_tokens == 0:
                name = make_block_hash_with_group_id(hashes[boundary // self._names.hash_tokens - 1], member)
                if self._jobs.hash_of(block_id) == name:
                    at.setdefault(boundary, {})[member] = block_id
        whole = sorted(boundary for boundary, blocks in at.items() if len(blocks) == len(group.members))
        whole = whole[: room // len(group.members)]
        if not whole:
            return None
        wanted = [boundary // group.kind.block_tokens - 1 for boundary in whole]
        block_ids = [[at[boundary][member] for boundary in whole] for member in group.members]
        return self._named(tracked.request, idx, wanted, block_ids)

    def _named(self, request: Request, idx: int, wanted: Sequence[int], block_ids: list[list[int]]) -> GroupBlocks:
        """Blocks of a request with their names: one run for each range without a gap."""
        kind = self._groups[idx].kind
        ranges = [(wanted[0], wanted[-1] + 1)] if isinstance(wanted, range) else list(_gapless_ranges(wanted))
        runs = [self._names.run(request, idx, kind, first, stop) for first, stop in ranges]
        return GroupBlocks(idx, runs, block_ids, [first for first, _ in ranges])


def _picked(row: Sequence[int], wanted: Sequence[int]) -> list[int]:
    if isinstance(wanted, range):
        return list(row[wanted.start : wanted.stop])
    return [row[nth] for nth in wanted]


def _gapless_ranges(wanted: Sequence[int]) -> Iterable[tuple[int, int]]:
    """[start, stop) of each range of blocks without a gap."""
    for _, members in itertools.groupby(enumerate(wanted), key=lambda pair: pair[1] - pair[0]):
        blocks = [block for _, block in members]
        yield blocks[0], blocks[-1] + 1
