import numpy as np
import pytest
import torch

from tests.vllm_plugin.worker.test_layout import LAYOUTS, NAMES, B, C, Caches, H, L, N, layout_of, numbered
from vllm_plugin.worker.copy import Copier, make_copier
from vllm_plugin.worker.copy.cpu import CpuCopier

BLOCK_BYTES = L * H * N * C * 2


def buffers(count: int) -> list[np.ndarray]:
    return [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(count)]


def copier_of(caches: Caches, num_shards: int) -> Copier:
    """Of one group with one block table."""
    return make_copier([layout_of(caches, num_shards)])


def test_a_kv_cache_on_the_cpu_gets_the_cpu_copier() -> None:
    assert isinstance(copier_of(LAYOUTS["LBHNC"](numbered()), 1), CpuCopier)


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", ["LBHNC", "LBNHC", "padding between blocks", "layers in reverse"])
def test_blocks_gathered_from_one_layout_scatter_into_another(source: str, target: str) -> None:
    values = numbered()
    sender = copier_of(LAYOUTS[source](values), 2)
    caches = LAYOUTS[target](torch.full_like(values, -2))
    receiver = copier_of(caches, 2)
    carried = buffers(2)
    sender.gather(sender.mark(), 0, [[1, 4]], carried)
    receiver.scatter(receiver.mark(), 0, [[3, 1]], carried)
    receiver.wait_scattered()
    for layer, cache in enumerate(caches.values()):
        assert torch.equal(cache[3], values[layer, 1])
        assert torch.equal(cache[1], values[layer, 4])
        assert (cache[[0, 2, 4]] == -2).all(), "a block was touched that was not named"


def test_padding_is_neither_read_nor_written() -> None:
    caches = LAYOUTS["padding between blocks"](numbered())
    first = caches[NAMES[0]]
    whole = first.as_strided((L, B, H * N * C + 10), (B * (H * N * C + 10), H * N * C + 10, 1))
    copier = copier_of(caches, 2)
    gathered = buffers(B)
    copier.gather(copier.mark(), 0, [range(B)], gathered)
    assert not any((buffer.view(np.int16) == -1).any() for buffer in gathered)
    copier.scatter(copier.mark(), 0, [range(B)], [np.full(BLOCK_BYTES, 9, np.uint8)] * B)
    copier.wait_scattered()
    assert (whole[:, :, -10:] == -1).all()
    assert (whole[:, :, :-10] == 0x0909).all()
