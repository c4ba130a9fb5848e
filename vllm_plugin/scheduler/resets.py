"""Resets: when the weights of a running engine may have changed, and how the weights that it has then are named.

vLLM resets the connector together with its own prefix cache when it is asked to (`reset_connector`), when the engine
goes to sleep, and when it is paused with `clear_cache`. `reset_prefix_cache()` alone leaves the connector out, and many
RL frameworks call it after they have updated the weights. So the block pool's own reset is observed, too.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metrics import Recorder
from vllm_plugin.scheduler.lookups import Lookups
from vllm_plugin.scheduler.pins import Pins
from vllm_plugin.scheduler.stages import Stages
from vllm_plugin.scheduler.stores import Stores

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

logger = init_logger("vllm.kvpool.resets")

MAX_NAME_CHARS = 200


class Resets:
    """One engine's: what a reset changes, by `on_reset` of `ConnectorConfig`.

    A reset moves the engine to another namespace. No other engine's blocks are harmed: those in the old namespace are
    correct for engines with the old weights.

    Args:
        pins: tell whether blocks of the engine are in use.

    Attributes:
        is_pending: blocks of the engine are from before a reset, or in doubt; nothing is loaded or stored until they
            are free.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        stages: Stages,
        lookups: Lookups,
        stores: Stores,
        pins: Pins,
        recorder: Recorder,
    ):
        self.is_pending = False
        self._is_broken = False
        self._config = config
        self._stages = stages
        self._lookups = lookups
        self._stores = stores
        self._pins = pins
        self._recorder = recorder
        self._is_epoch_private = False  # No other engine has its name.
        self._empty_own_cache: Callable[[], bool] | None = None
        self._is_own_cache_empty = True  # As vLLM's last reset of it has ended.

    def bind(self, block_pool: BlockPool) -> None:
        self._empty_own_cache = observe_resets(block_pool, self._own_cache_reset)

    def reset(self) -> bool:
        """Reads no block stored before, from now on; False: not before the engine's blocks in use are free."""
        if self._config.on_reset == "keep":
            return True
        self._change_namespace()
        return not self.is_pending

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
        if not self.is_pending or self._is_broken or len(self._pins) or not self._pins.nothing_in_use():
            return
        if self._empty_own_cache is not None and not self._empty_own_cache():
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
            self._follow_own_cache(succeeded)
        if part.failed:
            self.fail("a reset has failed")

    def _follow_own_cache(self, succeeded: bool) -> None:
        self._is_own_cache_empty = succeeded
        if self._config.on_reset == "leave" and (succeeded or self._pins.nothing_in_use()):
            self._change_namespace()

    def _change_namespace(self) -> None:
        named = named_epoch(self._config)
        if named is None and not (self.is_pending and self._is_epoch_private):
            self._move(f"{self._config.weights_epoch}#{uuid.uuid4().hex}")
        elif named == self._stages.weights_epoch:
            return  # The weights are what they were, by their name.
        elif named is not None:
            self._move(named)
        self._is_epoch_private = named is None
        # vLLM resets its own cache first, and comes here even where it could not: blocks in use are from before.
        self.is_pending = not (self._is_own_cache_empty and self._pins.nothing_in_use())
        self._recorder.set("sharing_off", int(self.is_pending))
        namespace = "a namespace of its own" if named is None else f"the namespace of weights epoch {named!r}"
        if self.is_pending:
            logger.warning(
                "kvpool: the engine was reset while KV blocks were in use: KV sharing is off until they are free; the "
                "engine has moved to %s",
                namespace,
            )
        else:
            logger.info("kvpool: the engine was reset and has moved to %s", namespace)

    def _move(self, weights_epoch: str) -> None:
        self._lookups.discard_all()
        self._lookups.flush()
        self._stores.change_epoch(weights_epoch)
        self._stages.move(weights_epoch)


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


def named_epoch(config: ConnectorConfig) -> str | None:
    """The weights epoch that `weights_epoch_file` names; None if there is no such file, or nothing readable in it.

    Equal names share a namespace. An empty file stands for the weights that the engine was started with.
    """
    if not config.weights_epoch_file:
        return None
    try:
        name = Path(config.weights_epoch_file).read_text(encoding="utf-8").strip()
        if len(name) > MAX_NAME_CHARS or not name.isprintable() or "#" in name:
            raise ValueError(f"it does not hold one line of at most {MAX_NAME_CHARS} printable characters without '#'")
    except (OSError, ValueError) as error:
        logger.warning(
            "kvpool: weights_epoch_file %s cannot be used (%s): the engine shares KV with no other engine until a "
            "reset that finds a usable name in the file",
            config.weights_epoch_file,
            error,
        )
        return None
    return f"{config.weights_epoch}@{name}" if name else config.weights_epoch
