"""Resets: when the weights of a running engine may have changed, and how the weights that it has then are named.

vLLM resets the connector together with its own prefix cache when it is asked to (`reset_connector`), when the engine
goes to sleep, and when it is paused with `clear_cache`. `reset_prefix_cache()` alone leaves the connector out, and many
RL frameworks call it after they have updated the weights. So the block pool's own reset is observed, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_plugin.config import ConnectorConfig

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

logger = init_logger("vllm.kvpool.resets")

MAX_NAME_CHARS = 200


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
    except (OSError, ValueError) as error:
        logger.warning("kvpool: weights_epoch_file cannot be read, so this engine shares with no other: %s", error)
        return None
    if len(name) > MAX_NAME_CHARS or not name.isprintable() or "#" in name:
        logger.warning(
            "kvpool: weights_epoch_file %s does not hold one line of at most %d printable characters without '#', so "
            "this engine shares with no other",
            config.weights_epoch_file,
            MAX_NAME_CHARS,
        )
        return None
    return f"{config.weights_epoch}@{name}" if name else config.weights_epoch
