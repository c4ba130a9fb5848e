"""The CUDA copier moves the same bytes as the CPU copier, whatever the layout, and no others."""

import time

import numpy as np
import pytest
import torch

from vllm_plugin.copy.cpu import CpuCopier
from vllm_plugin.layout import canonical_view

pytestmark = pytest.mark.gpu

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 5, 40, 4, 16, 256
NAMES = [f"layer.{idx}" for idx in range(LAYERS)]


def _caches(order: str, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Views [B, H, N, C] over one allocation whose physical order is `order`, filled with distinct bytes."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
    generator = torch.Generator().manual_seed(0)
    shape = [sizes[axis] for axis in order]
    raw = torch.randint(-128, 127, shape, dtype=torch.int8, generator=generator).to(device)
    logical = raw.permute([order.index(axis) for axis in "LBHNC"])
    return {name: logical[idx].view(dtype) for idx, name in enumerate(NAMES)}


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_same_bytes_as_on_the_cpu(order: str, num_shards: int):
    from vllm_plugin.copy.cuda import CudaCopier

    on_cpu = canonical_view(_caches(order, torch.bfloat16, "cpu"), NAMES, BLOCKS, num_shards)
    caches = _caches(order, torch.bfloat16, "cuda")
    on_gpu = canonical_view(caches, NAMES, BLOCKS, num_shards)
    ids = [7, 3, 39, 12]
    nbytes = sum(view[0].numel() for view in on_cpu)
    expected = [np.empty(nbytes, np.uint8) for _ in ids]
    CpuCopier(on_cpu).gather(None, ids, expected)
    copier = CudaCopier(on_gpu)
    taken = [np.empty(nbytes, np.uint8) for _ in ids]
    copier.gather(copier.mark(), ids, taken)
    assert all(np.array_equal(a, b) for a, b in zip(taken, expected, strict=True))

    before = {name: cache.clone() for name, cache in caches.items()}
    targets = [20, 21, 0, 38]
    copier.scatter(copier.mark(), targets, taken)
    copier.settle()
    for name, cache in caches.items():
        for block in range(BLOCKS):
            source = ids[targets.index(block)] if block in targets else block
            assert torch.equal(cache[block].view(torch.int8), before[name][source].view(torch.int8)), (name, block)


def test_adopted_memory_is_copied_to_and_from_directly_and_given_back():
    from vllm_plugin.copy.cuda import CudaCopier

    views = canonical_view(_caches("LBNHC", torch.bfloat16, "cuda"), NAMES, BLOCKS, 2)
    nbytes = sum(view[0].numel() for view in views)
    copier = CudaCopier(views)
    arenas = [np.zeros(64 * nbytes, np.uint8) for _ in range(2)]
    ids = list(range(5, 25))
    expected = [np.empty(nbytes, np.uint8) for _ in ids]
    copier.gather(copier.mark(), ids, expected)
    for arena in arenas:  # The second takes the first one's place.
        copier.adopt(arena)
        copier.adopt(arena)
        deadline = time.monotonic() + 10
        buffers = [arena[at * nbytes : (at + 1) * nbytes] for at in range(len(ids))]
        while not copier._pinned.borrow(buffers):
            assert time.monotonic() < deadline, "the memory was never pinned"
            time.sleep(0.01)
        copier._pinned.give_back()
        copier.gather(copier.mark(), ids, buffers)
        assert all(np.array_equal(a, b) for a, b in zip(buffers, expected, strict=True))
        targets = [block + 10 for block in ids]
        copier.scatter(copier.mark(), targets, buffers)
        copier.settle()
        taken = [np.empty(nbytes, np.uint8) for _ in targets]
        copier.gather(copier.mark(), targets, taken)
        assert all(np.array_equal(a, b) for a, b in zip(taken, expected, strict=True))
        copier.scatter(copier.mark(), ids, expected)  # For the second round.
        copier.settle()
    first = torch.cuda.cudart().cudaHostRegister(arenas[0].ctypes.data, arenas[0].nbytes, 0)
    assert int(first) == 0, "the first arena was not given back"
    torch.cuda.cudart().cudaHostUnregister(arenas[0].ctypes.data)
