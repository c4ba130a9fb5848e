"""Resets: after one, the weights of an engine may have changed, and the weights in memory tell whether they have.

vLLM resets the connector together with its own prefix cache when it is asked to (`reset_connector`), when the engine
goes to sleep, and when it is paused with `clear_cache`. `reset_prefix_cache()` alone leaves the connector out, and many
RL frameworks call it after they have updated the weights. So the block pool's own reset is observed, too.

After a reset every rank reports a digest of its weights, with the next step that a request waits for: by then weights
that are replaced after the reset are there, too, and a sleeping engine, whose weights are not, is not asked. Weights
that are what they were keep their namespace. Others are named by the ranks' digests, as are weights whose files nobody
can read, so that engines with equal weights and equal ranks share.
"""

from __future__ import annotations

import hashlib
import math
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metrics import Recorder
from vllm_plugin.scheduler.admission import Admission
from vllm_plugin.scheduler.stages import Stages
from vllm_plugin.scheduler.store_jobs import StoreJobs, num_orphans
from vllm_plugin.scheduler.stores import Stores

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

logger = init_logger("vllm.kvpool.resets")

CHECK_WITHIN_S = 30.0
"""Requests wait so long for the ranks' digests; later ones are computed."""


@dataclass(eq=False)
class Resets:
    """Ends sharing at a reset of an engine, and resumes it in the namespace of the weights in memory.

    A reset may move the engine to another namespace. No other engine's blocks are harmed: those in the old namespace
    are correct for engines with the old weights.

    Attributes:
        is_pending: blocks of the engine are from before a reset, or in doubt; nothing is loaded or stored until they
            are free.
    """

    _config: ConnectorConfig
    _stages: Stages
    _admission: Admission
    _stores: Stores
    _jobs: StoreJobs
    _recorder: Recorder
    _num_ranks: int

    def __post_init__(self) -> None:
        self.is_pending = False
        self._is_broken = False
        self._check = 0  # Number of the newest check of the weights; 0 is that of the start.
        self._named_check = -1  # Number of the newest check whose outcome named the namespace.
        self._asked_at: float | None = None  # When a request first waited for the check.
        self._digests: dict[int, dict[tuple[int, int], bytes]] = {0: {}}  # By check, then stage and rank.
        self._is_own_cache_empty = True  # As vLLM's last reset of it has ended.

    def bind(self, block_pool: BlockPool) -> None:
        let_resets_pass(block_pool, self._jobs)
        self._empty_own_cache = observe_resets(block_pool, self._own_cache_reset)

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
        if not self._empty_own_cache():
            return
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


def observe_resets(block_pool: BlockPool, tell: Callable[[bool], None]) -> Callable[[], bool]:
    """Has every reset of a block pool told, and whether it succeeded; returns the pool's own method.

    The method of this one object is wrapped: vLLM offers no hook, and what a reset leaves behind (an empty map, an
    event where events are on) would be seen too late, or be missed where a later release keeps the map.
    """
    reset = block_pool.reset_prefix_cache

    def reset_and_tell() -> bool:
        succeeded = False
        try:
            succeeded = reset()
        finally:
            tell(succeeded)
        return succeeded

    block_pool.reset_prefix_cache = reset_and_tell  # type: ignore[method-assign]
    return reset


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
