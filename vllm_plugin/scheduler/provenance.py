"""Which KV in an engine's blocks is what its namespace promises: after a reset, and beside other connectors.

Resets: after one, the weights of an engine may have changed. vLLM resets the connector together with its own prefix
cache when it is asked to (`reset_connector`), when the engine goes to sleep, and when it is paused with `clear_cache`.
`reset_prefix_cache()` alone leaves the connector out, and many RL frameworks call it after they have updated the
weights. So the block pool's own reset is observed, too. After a reset every rank reports a digest of its weights, with
the next step that a request waits for: by then weights that are replaced after the reset are there, and a sleeping
engine, whose weights are not, is not asked. Weights that are what they were keep their namespace. Others are named by
the ranks' digests, as are weights whose files nobody can read, so that engines with equal weights and ranks share.

Other connectors under a MultiConnector (peers): the pool gets none of the KV that they have loaded, nor what is
computed from it. A peer may name KV by the model's path or by tokens alone, and keep it for longer than the weights;
its load may fail, which is known only once others have read the blocks. So a request with tokens that a peer has loaded
stores nothing, and its blocks from there on are marked. A request that finds a marked block in the engine's own cache
stores nothing either, and its blocks from there on are marked, too. A block loses its mark when a request without
marked blocks is given it to write. vLLM tells a connector what it may load itself, and not what others do. That is seen
in the tokens that vLLM counts as computed, beyond those that it had itself when it asked. Without a load they can only
be the part of a cached block, which vLLM then copies.
"""

from __future__ import annotations

import hashlib
import math
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.groups import PoolGroup
from vllm_plugin.scheduler.admission import Admission
from vllm_plugin.scheduler.stages import Stages
from vllm_plugin.scheduler.store_jobs import StoreJobs, num_orphans
from vllm_plugin.scheduler.stores import Stores

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool.provenance")

CHECK_WITHIN_S = 30.0
"""Requests wait so long for the ranks' digests; later ones are computed."""

Tables = Sequence[Sequence[int]]


@dataclass(eq=False)
class Resets:
    """Ends sharing at a reset of an engine, and resumes it in the namespace of the weights in memory.

    No other engine's blocks are harmed: those in the old namespace are correct for engines with the old weights.
    """

    _config: ConnectorConfig
    _stages: Stages
    _admission: Admission
    _stores: Stores
    _jobs: StoreJobs
    _recorder: Recorder
    _num_ranks: int

    def __post_init__(self) -> None:
        # Blocks of the engine are from before a reset, or in doubt: nothing is loaded or stored until they are free.
        self.is_pending = False
        self._is_broken = False
        self._check = 0  # Number of the newest check of the weights; 0 is that of the start.
        self._named_check = -1  # Number of the newest check whose outcome named the namespace.
        self._asked_at: float | None = None  # When a request first waited for the check.
        self._digests: dict[int, dict[tuple[int, int], bytes]] = {0: {}}  # By check, then stage and rank.
        self._is_own_cache_empty = True  # As vLLM's last reset of it has ended.

    def bind(self, block_pool: BlockPool) -> None:
        """Observes every reset of a block pool.

        The method of this one object is wrapped: vLLM offers no hook, and what a reset leaves behind (an empty map, an
        event where events are on) would be seen too late, or be missed where a later release keeps the map.
        """
        let_resets_pass(block_pool, self._jobs)
        reset = self._empty_own_cache = block_pool.reset_prefix_cache

        def reset_and_tell() -> bool:
            succeeded = False
            try:
                succeeded = reset()
            finally:
                self._own_cache_reset(succeeded)
            return succeeded

        block_pool.reset_prefix_cache = reset_and_tell  # type: ignore[method-assign]

    @property
    def is_checked(self) -> bool:
        """Whether the engine's namespace is that of the weights in its ranks' memory."""
        return self._named_check == self._check or (not self._check and self._stages.are_weights_named)

    @property
    def may_share(self) -> bool:
        return self.is_checked and not self.is_pending

    def must_wait(self) -> bool:
        """Whether a request should be asked again, since the ranks are about to tell their weights."""
        if self.is_checked:
            return False
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        return True

    @property
    def has_waited(self) -> bool:
        """Whether the ranks have not told their weights in time."""
        return not self.is_checked and time.monotonic() - (self._asked_at or math.inf) > CHECK_WITHIN_S

    def check_due(self, num_tokens: int) -> int:
        """Number of the check that the ranks make with a step of so many tokens; 0: none."""
        return 0 if self.is_checked or not (num_tokens or self._asked_at is not None) else self._check

    def reset(self) -> bool:
        """Reads no block until the weights are known; False: not before the engine's blocks in use are free."""
        self._check += 1
        self._asked_at = None
        self._digests = {0: self._digests[0], self._check: {}}
        self._admission.discard_all()
        # vLLM resets its own cache first, and comes here even where it could not: blocks in use are from before.
        self.is_pending = self._is_broken or not (self._is_own_cache_empty and self._jobs.nothing_in_use())
        self._recorder.set("sharing_off", int(self.is_pending))
        if self.is_pending:
            logger.warning(
                "kvpool: the engine was reset while KV blocks were in use: KV sharing is off until they are free"
            )
        return not self.is_pending

    def weights_reported(self, reported: Iterable[tuple[int, int, int, bytes]]) -> None:
        """Ranks have reported digests of their weights, as in `WorkerMetadata.weights`."""
        for stage, rank, check, digest in reported:
            if check in self._digests:
                self._digests[check][stage, rank] = digest
        if all(len(digests) == self._num_ranks for digests in self._digests.values()) and not self.is_checked:
            self._name_weights()

    def _name_weights(self) -> None:
        """Moves to the namespace of the weights that all ranks have told."""
        first, now = self._digests[0], self._digests[self._check]
        epoch = self._config.weights_epoch
        if not all(now.values()) or self._stages.are_weights_in_doubt:
            epoch += f"#{uuid.uuid4().hex}"  # Nobody else's.
        elif now != first or not self._stages.are_weights_named:
            told = b"".join(digest for _, digest in sorted(now.items()))
            epoch += f"#{hashlib.sha256(told).hexdigest()[:32]}"
        self._named_check = self._check
        if epoch == self._stages.weights_epoch:
            logger.info("kvpool: the weights in memory are those of before the reset: KV sharing goes on")
            return
        logger.info("kvpool: the engine's weights are those of weights epoch %r from now on", epoch)
        self._admission.discard_all()
        self._stores.change_epoch(epoch)
        self._stages.move(epoch)

    def distrust(self) -> None:
        """Loads and stores nothing until no block of the engine is in use: some may not have the KV of their names."""
        if not self.is_pending:
            self._recorder.set("sharing_off", 1)
            logger.warning("kvpool: KV sharing is off until the engine's blocks in use are free")
        self.is_pending = True

    def fail(self, why: str) -> None:
        """Shares nothing any more: whether the engine's blocks have the KV that its namespace names is not known."""
        self._is_broken = self.is_pending = True
        self._recorder.set("sharing_off", 1)
        logger.error("kvpool: KV sharing is off for this engine until it is started again: %s", why)

    def finish(self) -> None:
        """Ends a reset that found blocks in use, once none is: those that are still cached are from before it."""
        if not self.is_pending or self._is_broken or len(self._jobs) or not self._jobs.nothing_in_use():
            return
        if self._empty_own_cache():
            self.is_pending, self._is_own_cache_empty = False, True
            self._recorder.set("sharing_off", 0)
            logger.info("kvpool: no KV block from before the reset is in use any more; KV sharing is on again")

    def _own_cache_reset(self, succeeded: bool) -> None:
        """vLLM's own prefix cache was reset, or would have been but for blocks that are in use.

        A reset that vLLM refuses because requests run has changed nothing. One that it refuses because of our pins
        alone would have succeeded without a pool, so it is ended when they are gone.
        """
        with self._recorder.guard.part("a reset of the engine's own cache") as part:
            self._is_own_cache_empty = succeeded
            if succeeded or self._jobs.nothing_in_use():
                self.reset()
        if part.failed:
            self.fail("a reset has failed")


def let_resets_pass(block_pool: BlockPool, jobs: StoreJobs) -> None:
    """Lets resets of a block pool count blocks that store jobs alone hold as free.

    `Scheduler.reset_prefix_cache(reset_running_requests=True)` preempts every request, and raises if a block is in use
    even so, before it tells the connector of the reset. A block that only a pin holds need not stop it: a reset forgets
    which prefix each block has and frees none, so the block stays pinned until its store has been reported, and no
    request hits it any more.

    A pin must stop a reset that is followed by a release of the KV cache's memory, which a store may still be reading.
    vLLM resets so in two places (`sleep`, `release_kv_cache_memory`), after a pause. With vLLM's core in a process of
    its own a pause lasts until the connector has no pinned blocks. In a core inside the caller's process it does not,
    so that there resets are left unchanged.

    Several kvpools under a MultiConnector have one block pool, and share one wrapper of its method.
    """
    from vllm import envs

    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return
    sharing: list[StoreJobs] = vars(block_pool).setdefault("_kvpool_jobs", [])
    sharing.append(jobs)
    if len(sharing) > 1:
        return
    reset = block_pool.reset_prefix_cache

    def reset_despite_pins() -> bool:
        num_free = block_pool.get_num_free_blocks() + num_orphans(block_pool, sharing)
        block_pool.get_num_free_blocks = lambda: num_free  # type: ignore[method-assign]
        try:
            return reset()
        finally:
            del block_pool.get_num_free_blocks  # The method of the class is back.

    block_pool.reset_prefix_cache = reset_despite_pins  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that was given blocks."""

    request: Request
    local: int | None  # Tokens that the engine had itself; None: vLLM has not asked, as the request's load has ended.
    num_loaded: int  # Tokens that kvpool loads.

    @property
    def exceeds(self) -> bool:
        """Whether vLLM counts more tokens as computed than the engine had, and kvpool loads none."""
        return self.local is not None and not self.num_loaded and self.request.num_computed_tokens > self.local


class PeerLoads:
    """Finds KV that other connectors have loaded into an engine's blocks, and keeps it out of the pool."""

    def __init__(self, groups: Sequence[PoolGroup], stores: Stores):
        self._groups = groups
        self._stores = stores
        self._admitted: dict[str, Admitted] = {}  # Since the last step.
        self._marked: set[int] = set()  # Blocks, by id.
        self._first: dict[str, int] = {}  # Request with marked blocks -> the first token that is in one.

    @property
    def _is_behind(self) -> bool:
        return bool(self._marked or self._first) or any(each.exceeds for each in self._admitted.values())

    def missed_step(self) -> bool:
        """A step's `prepare` has failed, or was not called; returns whether blocks may lack a mark."""
        is_behind = self._is_behind
        self._admitted.clear()
        return is_behind

    def admitted(self, request: Request, local: int | None, num_loaded: int) -> None:
        self._admitted[request.request_id] = Admitted(request, local, num_loaded)

    def finished(self, request_id: str) -> None:
        self._admitted.pop(request_id, None)
        self._first.pop(request_id, None)

    def prepare(self, output: SchedulerOutput) -> None:
        """Marks the blocks of a step, before its stores are built, in vLLM's order: one may share those before it."""
        state = output.kv_connector_block_state
        if state is not None and self._is_behind:
            running = output.scheduled_cached_reqs
            for request_id, rows in zip(running.req_ids, running.new_block_ids, strict=True):
                if rows and request_id not in self._admitted:
                    change = self._marked.update if request_id in self._first else self._marked.difference_update
                    change(*rows)
            self._marked.discard(0)
            copies = output.kv_cache_block_copies or ()
            for copy in copies:
                change_one = self._marked.add if copy.src_block_id in self._marked else self._marked.discard
                change_one(copy.dst_block_id)
            copied = {copy.dst_block_id for copy in copies}
            for request_id, admitted in self._admitted.items():
                self._judge(admitted, state.resolve_block_ids(request_id), copied)
        self._admitted.clear()

    def _judge(self, admitted: Admitted, tables: Tables, copied: set[int]) -> None:
        request, local = admitted.request, admitted.local
        request_id, first = request.request_id, self._first.get(request.request_id)
        if local is not None:
            exceeds = admitted.exceeds
            if exceeds and any(not copied.isdisjoint(row) for row in self._from(tables, local)):
                exceeds, local = False, request.num_computed_tokens
            first = self._first_marked(tables, local)
            if first is None and exceeds:
                first = local
        if first is None:
            if self._first.pop(request_id, None) is not None:
                self._stores.allow(request_id)
            self._marked.difference_update(*tables)
            return
        if not self._marked:
            logger.info("kvpool: another connector loads KV: requests that have such KV store nothing in the pool")
        self._first[request_id] = first
        self._stores.forbid(request_id)
        self._marked.update(*self._from(tables, first))
        self._marked.discard(0)

    def _from(self, tables: Tables, first: int) -> list[Sequence[int]]:
        """The blocks of a request from its token `first` on."""
        return [
            tables[member][first // group.kind.block_tokens :] for group in self._groups for member in group.members
        ]

    def _first_marked(self, tables: Tables, local: int) -> int | None:
        """The first token of the first marked block among those that hold a request's first `local` tokens.

        Where a request has just been given its blocks, those of states are at their positions, too.
        """
        sizes = [(group.kind.block_tokens, member) for group in self._groups for member in group.members]
        marked = (
            nth * size
            for size, member in sizes
            for nth, block_id in enumerate(tables[member][: -(-local // size)])
            if block_id in self._marked
        )
        return min(marked, default=None)
