"""How fast blocks move between a GPU's KV cache and pinned memory, hashed on the way, beside the bus itself.

Llama-3.1-8B's shape: 2 MiB a block of 16 tokens, in 32 layers. Needs CUDA and 12 GiB of its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.harness import measuring as harness
from benchmarks.harness.measuring import Row, at_least

LAYERS, HEADS, BLOCK_TOKENS, CONTENT_BYTES = 32, 8, 16, 512
NUM_ENGINE_BLOCKS = 3000
PIN_S = 30.0


def main(
    rounds: Annotated[int, typer.Option(help="Rounds that count.")] = 10,
    blocks: Annotated[int, typer.Option(help="Blocks in a transfer.")] = 1250,
) -> None:
    """Time gathering and scattering in alternation with plain copies of as many bytes."""
    from vllm_plugin.worker.copy import make_layout
    from vllm_plugin.worker.copy.cuda import STAGING_BYTES, CudaCopier
    from vllm_plugin.worker.copy.driver import REGISTER_STEP_BYTES

    shape = (LAYERS, NUM_ENGINE_BLOCKS, HEADS, BLOCK_TOKENS, CONTENT_BYTES)
    memory = torch.zeros(shape, dtype=torch.int8, device="cuda")
    caches = {f"layer.{idx}": memory[idx].view(torch.bfloat16) for idx in range(LAYERS)}
    layout = make_layout(caches, [list(caches)], NUM_ENGINE_BLOCKS, 1)
    arena = np.zeros(blocks * layout.region_bytes, np.uint8)
    buffers = arena.reshape(blocks, layout.region_bytes)
    copier = CudaCopier([layout])
    copier.adopt(arena)
    harness.until_true(lambda: _is_pinned(copier, buffers), "the memory is not pinned", PIN_S)
    on_device = torch.empty(arena.shape, dtype=torch.uint8, device="cuda")
    on_host = torch.from_numpy(arena)
    ids = list(range(7, 7 + blocks))

    def batches() -> Iterator[slice]:
        step = STAGING_BYTES // layout.region_bytes
        return (slice(first, first + step) for first in range(0, blocks, step))

    def moved(move: Callable[..., Callable[[], object] | None]) -> float:
        mark = copier.mark()
        started = time.perf_counter()
        sums = [move(mark, 0, [ids[batch]], list(buffers[batch])) for batch in batches()]
        for later in sums:
            assert later is not None, "chunks of this shape are hashed on the device"
            later()
        return time.perf_counter() - started

    def copied(target: torch.Tensor, source: torch.Tensor) -> float:
        started = time.perf_counter()
        for one, other in zip(target.split(REGISTER_STEP_BYTES), source.split(REGISTER_STEP_BYTES), strict=True):
            one.copy_(other, non_blocking=True)  # CUDA copies from and to one registration at a time.
        torch.cuda.synchronize()
        return time.perf_counter() - started

    taken = harness.alternate(
        {
            "gather": lambda: moved(copier.gather),
            "bus, to the host": lambda: copied(on_host, on_device),
            "scatter": lambda: moved(copier.scatter),
            "bus, to the device": lambda: copied(on_device, on_host),
        },
        rounds,
    )
    copier.wait_scattered()
    rows = [Row(name, harness.gb_per_s(arena.nbytes, seconds), "GB/s") for name, seconds in taken.items()]
    rows += [
        at_least(f"{move} over the bus", harness.speed_ratio(taken[move], taken[f"bus, to the {side}"]), "ratio", 0.9)
        for move, side in (("gather", "host"), ("scatter", "device"))
    ]
    harness.report("gpu_copy", rows, rounds=rounds, blocks=blocks, block_bytes=layout.region_bytes)


def _is_pinned(copier: object, buffers: np.ndarray) -> bool:
    pinned = copier._pinned  # type: ignore[attr-defined]
    if not pinned.borrow(list(buffers)):
        return False
    pinned.give_back()
    return True


if __name__ == "__main__":
    typer.run(main)
