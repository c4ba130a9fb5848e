"""Lets vLLM reset its prefix cache while blocks are being stored.

`Scheduler.reset_prefix_cache(reset_running_requests=True)` preempts every request, and raises if a block is in use even
so, before it tells the connector of the reset. A block that only a pin holds need not stop it: a reset forgets which
prefix each block has and frees none, so the block stays pinned until its store has been reported, and no request hits
it any more.

A pin must stop a reset that is followed by a release of the KV cache's memory, which a store may still be reading. vLLM
resets so in two places (`sleep`, `release_kv_cache_memory`), after a pause. With vLLM's core in a process of its own a
pause lasts until the connector has no pinned blocks. In a core inside the caller's process it does not, so that there
resets are left unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_plugin.scheduler.pins import Pins, num_orphans

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


def let_resets_pass(block_pool: BlockPool, pins: Pins) -> None:
    """Lets resets of a block pool count blocks that pins alone hold as free.

    Several kvpools under a MultiConnector have one block pool, and share one wrapper of its method.
    """
    from vllm import envs

    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return
    sharing: list[Pins] = vars(block_pool).setdefault("_kvpool_pins", [])
    sharing.append(pins)
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
