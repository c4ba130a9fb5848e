"""Whatever way vLLM lays its KV cache out, the pool sees shard, layer, head, token, K and V.

`tests/vllm_plugin/test_ranks.py` copies blocks between layouts.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch

from vllm_plugin.worker.copy import make_copier
from vllm_plugin.worker.copy.cpu import CpuCopier
from vllm_plugin.worker.layout import Layout, make_layout

L, B, H, N, C = 3, 5, 4, 8, 6
NAMES = tuple(f"layers.{idx}" for idx in range(L))
Caches = Mapping[str, torch.Tensor]


def numbered() -> torch.Tensor:
    """Distinct values: int16 [L, B, H, N, C]."""
    return torch.arange(L * B * H * N * C, dtype=torch.int16).reshape(L, B, H, N, C)


def laid_out(values: torch.Tensor, order: str) -> Caches:
    """The values in one allocation whose axes lie in `order`, seen as vLLM shows each layer: [B, H, N, C]."""
    axes = ["LBHNC".index(axis) for axis in order]
    stored = values.permute(axes).contiguous()
    back = stored.permute([order.index(axis) for axis in "LBHNC"])
    return dict(zip(NAMES, back, strict=True))


def padded(values: torch.Tensor) -> Caches:
    """Blocks with undefined bytes between them."""
    room = torch.full((L, B, H * N * C + 10), -1, dtype=torch.int16)
    layers = room[:, :, : H * N * C].unflatten(2, (H, N, C))
    layers.copy_(values)
    return dict(zip(NAMES, layers, strict=True))


def uneven(values: torch.Tensor) -> Caches:
    room = torch.full((2 * L, B, H, N, C), -1, dtype=torch.int16)
    places = [0, 2, 5]
    for place, layer in zip(places, values, strict=True):
        room[place] = layer
    return {name: room[place] for name, place in zip(NAMES, places, strict=True)}


def backwards(values: torch.Tensor) -> Caches:
    room = values.flip(0).contiguous()
    return dict(zip(NAMES, reversed(room.unbind(0)), strict=True))


def apart(values: torch.Tensor) -> Caches:
    return {name: layer.clone() for name, layer in zip(NAMES, values, strict=True)}


LAYOUTS: dict[str, Callable[[torch.Tensor], Caches]] = {
    "LBHNC": lambda values: laid_out(values, "LBHNC"),
    "LBNHC": lambda values: laid_out(values, "LBNHC"),
    "BLHNC": lambda values: laid_out(values, "BLHNC"),
    "padding between blocks": padded,
    "layers spaced unevenly": uneven,
    "layers in reverse": backwards,
    "an allocation a layer": apart,
}


def layout_of(caches: Caches, num_shards: int, names: Sequence[Sequence[str]] = (NAMES,)) -> Layout:
    return make_layout(caches, names, B, num_shards)


def canonical_bytes(layout: Layout, *block_ids: int) -> bytes:
    """A block as it is stored, its id in each member's table given: [S, L, H / S, r, N / r, C bytes]."""
    chunks = [part.view[block_ids[part.member]].flatten(1) for part in layout.parts]
    return torch.cat(chunks, dim=1).contiguous().numpy().tobytes()


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_bytes(layout: str, num_shards: int) -> None:
    values = numbered()
    made = layout_of(LAYOUTS[layout](values), num_shards)
    assert sum(part.view.shape[2] for part in made.parts) == L
    assert (made.num_shards, made.region_bytes) == (num_shards, L * H * N * C * 2)
    for block_id in range(B):
        # [L, H, N, C] -> shard, layer, head of the shard, token, C
        expected = values[:, block_id].unflatten(1, (num_shards, -1)).transpose(0, 1).contiguous()
        assert canonical_bytes(made, block_id) == expected.numpy().tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_are_the_kv_cache_itself(layout: str) -> None:
    caches = LAYOUTS[layout](numbered())
    for part in layout_of(caches, 2).parts:
        part.view[3] = 7
    for cache in caches.values():
        assert (cache[3] == 0x0707).all()
        assert (cache[[0, 1, 2, 4]] != 0x0707).any()


def test_padding_is_neither_read_nor_written() -> None:
    caches, block_bytes = LAYOUTS["padding between blocks"](numbered()), L * H * N * C * 2
    first = caches[NAMES[0]]
    whole = first.as_strided((L, B, H * N * C + 10), (B * (H * N * C + 10), H * N * C + 10, 1))
    copier = make_copier([layout_of(caches, 2)])
    assert isinstance(copier, CpuCopier)
    gathered = [np.zeros(block_bytes, np.uint8) for _ in range(B)]
    copier.gather(copier.mark(), 0, [range(B)], gathered)
    assert not any((buffer.view(np.int16) == -1).any() for buffer in gathered)
    copier.scatter(copier.mark(), 0, [range(B)], [np.full(block_bytes, 9, np.uint8)] * B)
    copier.wait_scattered()
    assert (whole[:, :, -10:] == -1).all()
    assert (whole[:, :, :-10] == 0x0909).all()


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "padding between blocks"])
def test_evenly_spaced_layers_are_one_view(layout: str) -> None:
    assert len(layout_of(LAYOUTS[layout](numbered()), 2).parts) == 1


@pytest.mark.parametrize("layout", ["layers spaced unevenly", "layers in reverse", "an allocation a layer"])
def test_other_layers_are_a_view_each(layout: str) -> None:
    assert len(layout_of(LAYOUTS[layout](numbered()), 2).parts) == L


def test_kernel_blocks_smaller_than_blocks_are_put_together() -> None:
    values = numbered()
    # vLLM shows two kernel blocks a block: [2 * B, H, N / 2, C], each of them contiguous.
    kernel = values.unflatten(3, (2, N // 2)).permute(0, 1, 3, 2, 4, 5).reshape(L, 2 * B, H, N // 2, C).contiguous()
    made = layout_of(dict(zip(NAMES, kernel, strict=True)), 2)
    assert [tuple(part.view.shape) for part in made.parts] == [(B, 2, L, H // 2, 2, N // 2, 2 * C)]
    for block_id in range(B):
        # Heads first, then both halves: the tokens of a head stay in order.
        expected = values[:, block_id].unflatten(1, (2, -1)).transpose(0, 1).contiguous()
        assert canonical_bytes(made, block_id) == expected.numpy().tobytes()


def test_a_layer_that_vllm_did_not_register_is_named() -> None:
    with pytest.raises(ValueError, match=r"layer 'layers\.2' has no KV cache"):
        layout_of({name: torch.zeros(B, H, N, C) for name in NAMES[:2]}, 1)


@pytest.mark.parametrize(
    ("cache", "num_shards"),
    [
        (torch.zeros(B, H, N), 1),  # Not four axes.
        (torch.zeros(B + 1, H, N, C), 1),  # No whole number of kernel blocks.
        (torch.zeros(B, H, N, C), 3),  # Shards that do not divide the heads.
        (torch.zeros(B, H, C, N).transpose(2, 3), 1),  # K and V not next to each other.
    ],
)
def test_a_shape_the_pool_does_not_know_is_refused(cache: torch.Tensor, num_shards: int) -> None:
    with pytest.raises(ValueError, match="KV cache of layer 'odd' has shape"):
        layout_of({"odd": cache}, num_shards, [["odd"]])


# Several members, several shapes


def test_layers_follow_each_other_member_by_member() -> None:
    values = numbered()
    made = layout_of(dict(zip(NAMES, values, strict=True)), 2, [NAMES[1:], NAMES[:1]])
    assert [(part.member, part.view.shape[2]) for part in made.parts] == [(0, 2), (1, 1)]
    assert [part.start for part in made.parts] == [0, made.parts[0].chunk_bytes]
    first, second = (values[1:, 4], values[:1, 2])
    expected = torch.cat([first, second]).unflatten(1, (2, -1)).transpose(0, 1).contiguous()
    assert canonical_bytes(made, 4, 2) == expected.numpy().tobytes()


def test_neighbours_of_other_shapes_are_parts_of_their_own() -> None:
    caches = {"a": torch.zeros(B, 4, N, C), "b": torch.zeros(B, 8, N, C), "c": torch.zeros(B, 4, N, 2 * C)}
    made = layout_of(caches, 4, [list(caches)])
    assert [part.chunk_bytes for part in made.parts] == [N * C * 4, 2 * N * C * 4, 2 * N * C * 4]
    assert [part.start for part in made.parts] == [0, N * C * 4, 3 * N * C * 4]
    assert made.chunk_bytes == 5 * N * C * 4


def test_groups_that_overlay_each_other_are_read_by_the_blocks_that_are_theirs() -> None:
    room = numbered()[0]
    states = room.flatten(1).view(torch.int8)[:, :30].unflatten(1, (1, 1, 30))
    attention = layout_of({"a": room}, 2, [["a"]])
    state = layout_of({"s": states}, 1, [["s"]])
    assert canonical_bytes(state, 2) == room[2].numpy().tobytes()[:30]
    for part in state.parts:
        part.view[2] = 0
    assert canonical_bytes(attention, 1) == numbered()[0, 1].numpy().tobytes()
    assert canonical_bytes(attention, 2)[:30] == bytes(30)
