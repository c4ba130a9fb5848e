"""Whatever way vLLM lays its KV cache out, the pool sees shard, layer, head, token, K and V.

`tests/vllm_plugin/test_ranks.py` copies blocks between layouts.
"""

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from vllm_plugin.worker.copy import Layout, make_layout

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


EVEN = ("LBHNC", "LBNHC", "BLHNC", "padding between blocks")
"""Layouts whose layers lie evenly spaced."""


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
    assert [part.view.shape[2] for part in made.parts] == ([L] if layout in EVEN else [1] * L), "as few views as can be"
    assert (made.num_shards, made.region_bytes) == (num_shards, L * H * N * C * 2)
    for block_id in range(B):
        # [L, H, N, C] -> shard, layer, head of the shard, token, C
        expected = values[:, block_id].unflatten(1, (num_shards, -1)).transpose(0, 1).contiguous()
        assert canonical_bytes(made, block_id) == expected.numpy().tobytes()


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
    with pytest.raises(ValueError, match="layer 'odd' has no KV cache"):
        layout_of({}, num_shards, [["odd"]])


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
