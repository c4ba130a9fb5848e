"""The CUDA copier moves the same bytes as the CPU copier, whatever the layout, and no others."""

import itertools
import math
import threading
import time

import numpy as np
import pytest
import torch

from kvpool.protocol.hashing import checksum
from tests.support.processes import wait_for
from vllm_plugin.worker.copy import CpuCopier, Layout, make_layout

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


def _layout(caches: dict[str, torch.Tensor], num_shards: int, layers: tuple[list[str], ...] = (NAMES,)) -> Layout:
    return make_layout(caches, layers, BLOCKS, num_shards)


def _gather(copier, layout: Layout, group_idx: int, ids, buffers) -> None:
    """Returns when the blocks have been gathered; the device's checksums must be the library's."""
    sums = copier.gather(copier.mark(), group_idx, ids, buffers)
    assert (sums is None) == (layout.chunk_bytes % 8 > 0 or layout.chunk_bytes < 241)
    if sums is not None:
        assert sums() == _checksums(layout, buffers)


def _scatter(copier, layout: Layout, group_idx: int, ids, buffers) -> None:
    """The same for scattering."""
    sums = copier.scatter(copier.mark(), group_idx, ids, buffers)
    if sums is not None:
        assert sums() == _checksums(layout, buffers)
    copier.wait_scattered()


def _checksums(layout: Layout, buffers) -> list[int]:
    return [checksum(chunk) for buffer in buffers for chunk in np.split(buffer, layout.num_shards)]


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_same_bytes_as_on_the_cpu(order: str, num_shards: int):
    from vllm_plugin.worker.copy.cuda import CudaCopier

    members = (NAMES[:3], NAMES[3:])  # Two of the engine's groups, with a block table each.
    on_cpu = _layout(_caches(order, torch.bfloat16, "cpu"), num_shards, members)
    caches = _caches(order, torch.bfloat16, "cuda")
    ids = [[7, 3, 39, 12], [1, 30, 2, 12]]
    expected = [np.empty(on_cpu.region_bytes, np.uint8) for _ in ids[0]]
    CpuCopier([on_cpu]).gather(None, 0, ids, expected)
    copier = CudaCopier([_layout(caches, num_shards, members)])
    taken = [np.empty(on_cpu.region_bytes, np.uint8) for _ in ids[0]]
    _gather(copier, on_cpu, 0, ids, taken)
    assert all(np.array_equal(a, b) for a, b in zip(taken, expected, strict=True))

    before = {name: cache.clone() for name, cache in caches.items()}
    targets = [[20, 21, 0, 38], [0, 5, 39, 6]]
    _scatter(copier, on_cpu, 0, targets, taken)
    for member, names in enumerate(members):
        moved = dict(zip(targets[member], ids[member], strict=True))
        for name, block in itertools.product(names, range(BLOCKS)):
            wanted = before[name][moved.get(block, block)]
            assert torch.equal(caches[name][block].view(torch.int8), wanted.view(torch.int8)), (name, block)


def test_groups_of_other_shapes_and_odd_sizes():
    from vllm_plugin.worker.copy.cuda import CudaCopier

    # Layers of other head counts in one group, and a state whose bytes are no whole words.
    generator = torch.Generator().manual_seed(1)
    shapes = {"wide": (BLOCKS, 4, TOKENS, 64), "narrow": (BLOCKS, 2, TOKENS, 32), "state": (BLOCKS, 1, 1, 77)}
    rooms = {
        name: torch.randint(-128, 127, (BLOCKS, math.prod(shape[1:]) + 19), dtype=torch.int8, generator=generator)
        for name, shape in shapes.items()
    }

    def views(device: str) -> dict[str, torch.Tensor]:
        return {
            name: room.to(device)[:, : math.prod(shapes[name][1:])].unflatten(1, shapes[name][1:])
            for name, room in rooms.items()
        }

    on_cpu, on_gpu = views("cpu"), views("cuda")
    layouts = [
        [_layout(caches, 2, (["wide", "narrow"],)), _layout(caches, 1, (["state"],))] for caches in (on_cpu, on_gpu)
    ]
    reference, copier = CpuCopier(layouts[0]), CudaCopier(layouts[1])
    for group_idx, layout in enumerate(layouts[0]):
        ids, targets = [[4, 39, 0]], [[9, 8, 20]]
        expected, taken = ([np.empty(layout.region_bytes, np.uint8) for _ in range(3)] for _ in range(2))
        reference.gather(None, group_idx, ids, expected)
        _gather(copier, layout, group_idx, ids, taken)
        assert all(np.array_equal(a, b) for a, b in zip(taken, expected, strict=True))
        reference.scatter(None, group_idx, targets, expected)
        _scatter(copier, layout, group_idx, targets, expected)
    for name, cache in on_gpu.items():
        assert torch.equal(cache.cpu(), on_cpu[name]), name


def test_adopted_memory_is_copied_to_and_from_directly_and_given_back():
    from vllm_plugin.worker.copy.cuda import CudaCopier

    layout = _layout(_caches("LBNHC", torch.bfloat16, "cuda"), 2)
    nbytes = layout.region_bytes
    copier = CudaCopier([layout])
    arenas = [np.zeros(64 * nbytes, np.uint8) for _ in range(2)]
    ids = list(range(5, 25))
    expected = [np.empty(nbytes, np.uint8) for _ in ids]
    _gather(copier, layout, 0, [ids], expected)
    for arena in arenas:  # The second takes the first one's place.
        copier.adopt(arena)
        copier.adopt(arena)
        deadline = time.monotonic() + 10
        buffers = [arena[at * nbytes : (at + 1) * nbytes] for at in range(len(ids))]
        while not copier._pinned.borrow(buffers):
            assert time.monotonic() < deadline, "the memory was never pinned"
            time.sleep(0.01)
        copier._pinned.give_back()
        _gather(copier, layout, 0, [ids], buffers)
        assert all(np.array_equal(a, b) for a, b in zip(buffers, expected, strict=True))
        targets = [block + 10 for block in ids]
        scattered = [buffers[nth] for nth in (0, 1, 2, 7, 5, 6, 19)]  # Some are neighbours, some are not.
        spread = [targets[nth] for nth in (0, 1, 2, 7, 5, 6, 19)]
        _scatter(copier, layout, 0, [spread], scattered)
        _scatter(copier, layout, 0, [targets], buffers)
        taken = [np.empty(nbytes, np.uint8) for _ in targets]
        _gather(copier, layout, 0, [targets], taken)
        assert all(np.array_equal(a, b) for a, b in zip(taken, expected, strict=True))
        _scatter(copier, layout, 0, [ids], expected)  # For the second round.
    first = torch.cuda.cudart().cudaHostRegister(arenas[0].ctypes.data, arenas[0].nbytes, 0)
    assert int(first) == 0, "the first arena was not given back"
    torch.cuda.cudart().cudaHostUnregister(arenas[0].ctypes.data)


def test_what_arrives_is_hashed_not_what_was_sent():
    from vllm_plugin.worker.copy.cuda import CudaCopier

    layout = _layout(_caches("LBNHC", torch.bfloat16, "cuda"), 4)
    copier = CudaCopier([layout])
    ids = list(range(6))
    buffers = [np.empty(layout.region_bytes, np.uint8) for _ in ids]
    right = copier.gather(copier.mark(), 0, [ids], buffers)()
    buffers[3][layout.chunk_bytes + 5] ^= 16
    found = copier.scatter(copier.mark(), 0, [ids], buffers)()
    copier.wait_scattered()
    assert [idx for idx, (one, other) in enumerate(zip(found, right, strict=True)) if one != other] == [3 * 4 + 1]


def test_the_engine_captures_cuda_graphs_meanwhile():
    """Memory is pinned and blocks are copied by other threads, of which CUDA ends a capture unless they stay apart."""
    from vllm_plugin.worker.copy.cuda import CudaCopier

    caches = _caches("LBHNC", torch.bfloat16, "cuda")
    layout = _layout(caches, 1)
    copier = CudaCopier([layout])
    memory = np.zeros(4 << 30, np.uint8)
    rows = list(memory[: 4 * layout.region_bytes].reshape(4, -1))
    ending = threading.Event()
    errors: list[Exception] = []
    counter, captured = torch.zeros(1, device="cuda"), 0

    def copy() -> None:
        try:
            while not ending.is_set():
                _gather(copier, layout, 0, [[1, 2, 3, 4]], rows)
                _scatter(copier, layout, 0, [[1, 2, 3, 4]], rows)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=copy)
    copier.adopt(memory)
    thread.start()
    try:
        ends_at = time.monotonic() + 3
        while time.monotonic() < ends_at:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                counter.add_(1)
            graph.replay()
            captured += 1
    finally:
        ending.set()
        thread.join()
    assert not errors and counter.item() == captured > 10
    wait_for(lambda: copier._pinned._registered_bytes == memory.nbytes, "the memory to be pinned", 30)
