"""Blocks on their way from ranks to the pool to other ranks, against a model of the bytes in plain numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import effort
from tests.support.values import group_spec
from vllm_plugin.model.groups import rank_shards
from vllm_plugin.worker.copy import CpuCopier, Layout, make_layout

NUM_BLOCKS = 6
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Layer:
    """Heads of the whole model, tokens of a block, bytes of a token in a head."""

    heads: int
    tokens: int
    content: int


Members = Sequence[Sequence[Layer]]


@st.composite
def groups(draw: st.DrawFn) -> tuple[Members, int]:
    """The layers of each member, and the group's shards; heads are mixed, or so few that ranks are replicas."""
    heads = draw(st.sampled_from([1, 2, 4]))
    more = [heads, 2 * heads, 3 * heads] if heads == 4 else [heads]
    layer = st.builds(Layer, st.sampled_from(more), st.sampled_from([4, 8]), st.sampled_from([3, 8]))
    members = draw(st.lists(st.lists(layer, min_size=1, max_size=3), min_size=1, max_size=3))
    return members, heads


def canonical(values: Sequence[Bytes], num_shards: int) -> Bytes:
    """What the pool has of a block: shard, layer, head, token, content. `values`: [H, N, C] of each layer."""
    chunks = [layer[part] for part in range(num_shards) for layer in (np.split(v, num_shards) for v in values)]
    return np.concatenate([chunk.reshape(-1) for chunk in chunks])


class Rank:
    """One rank's KV cache, laid out in a way of its own."""

    def __init__(self, draw: Any, members: Members, num_shards: int, tp_rank: int, tp_size: int):
        self.mine = rank_shards(group_spec(num_kv_heads=num_shards, num_shards=num_shards), tp_rank, tp_size)
        self._members = members
        self._place = tp_rank, tp_size
        self.caches: dict[str, torch.Tensor] = {}
        names = []
        for member, layers in enumerate(members):
            names.append([f"{member}.{nth}" for nth in range(len(layers))])
            for name, layer in zip(names[-1], layers, strict=True):
                self.caches[name] = self._lay_out(
                    layer, draw(st.sampled_from(["BHNC", "BNHC", "HBNC", "split", "room"]))
                )
        self.layout: Layout = make_layout(self.caches, names, NUM_BLOCKS, self.mine.shards.count)
        self.copier = CpuCopier([self.layout])
        self.names = names

    def heads(self, layer: Layer) -> slice:
        """The heads of a layer that are this rank's, as vLLM deals them out."""
        tp_rank, tp_size = self._place
        count = max(1, layer.heads // tp_size)
        first = tp_rank * layer.heads // tp_size
        return slice(first, first + count)

    def block(self, name: str, block_id: int) -> Bytes:
        """[H, N, C] of one block, wherever its bytes are."""
        cache = self.caches[name]
        ratio = cache.shape[0] // NUM_BLOCKS
        pages = [cache[block_id * ratio + nth].numpy() for nth in range(ratio)]
        return np.concatenate(pages, axis=1)

    def write(self, name: str, block_id: int, value: Bytes) -> None:
        cache = self.caches[name]
        ratio = cache.shape[0] // NUM_BLOCKS
        for nth, page in enumerate(np.split(value, ratio, axis=1)):
            cache[block_id * ratio + nth] = torch.from_numpy(page)

    def _lay_out(self, layer: Layer, way: str) -> torch.Tensor:
        sizes = {"B": NUM_BLOCKS, "H": len(range(*self.heads(layer).indices(layer.heads))), "N": layer.tokens}
        sizes["C"] = layer.content
        if way == "split":  # Two kernel blocks a block.
            sizes |= {"B": 2 * NUM_BLOCKS, "N": layer.tokens // 2}
            way = "BNHC"
        if way == "room":  # Bytes between blocks that are nobody's.
            shape = [sizes[axis] for axis in "HNC"]
            return torch.full((NUM_BLOCKS, math.prod(shape) + 5), 255, dtype=torch.uint8)[:, :-5].unflatten(1, shape)
        room = torch.full([sizes[axis] for axis in way], 255, dtype=torch.uint8)
        return room.permute([way.index(axis) for axis in "BHNC"])


@settings(max_examples=effort(75))
@given(groups(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.data())
def test_any_ranks_read_what_any_ranks_wrote(
    group: tuple[Members, int], writers: int, readers: int, num_blocks: int, data: st.DataObject
) -> None:
    members, num_shards = group
    layers = [layer for member in members for layer in member]
    picks = np.random.default_rng(num_blocks + 10 * len(layers))
    # values[b][l]: [H, N, C]
    values = [
        [picks.integers(0, 255, (layer.heads, layer.tokens, layer.content), np.uint8) for layer in layers]
        for _ in range(num_blocks)
    ]
    tables = st.permutations(range(NUM_BLOCKS)).map(lambda ids: list(ids)[:num_blocks])
    pool: list[Bytes] = []
    for tp_rank in range(writers):
        rank = Rank(data.draw, members, num_shards, tp_rank, writers)
        chunk_bytes = rank.layout.chunk_bytes
        pool = pool or [np.zeros(num_shards * chunk_bytes, np.uint8) for _ in range(num_blocks)]
        ids = [data.draw(tables) for _ in members]
        places = [(name, ids[member]) for member, names in enumerate(rank.names) for name in names]
        for nth, block in enumerate(values):
            for layer, value, (name, table) in zip(layers, block, places, strict=True):
                rank.write(name, table[nth], value[rank.heads(layer)])
        start = rank.mine.shards.start * chunk_bytes
        buffers = [region[start : start + rank.layout.region_bytes] for region in pool]
        gathered = [np.zeros_like(buffer) for buffer in buffers]
        rank.copier.gather(None, 0, ids, gathered)
        if rank.mine.writes:
            for buffer, region in zip(buffers, gathered, strict=True):
                buffer[:] = region
        else:
            assert all(np.array_equal(a, b) for a, b in zip(buffers, gathered, strict=True)), (
                "a replica has other bytes"
            )
    for region, block in zip(pool, values, strict=True):
        assert np.array_equal(region, canonical(block, num_shards))

    for tp_rank in range(readers):
        rank = Rank(data.draw, members, num_shards, tp_rank, readers)
        start = rank.mine.shards.start * rank.layout.chunk_bytes
        ids = [data.draw(tables) for _ in members]
        rank.copier.scatter(None, 0, ids, [region[start : start + rank.layout.region_bytes] for region in pool])
        places = [(name, ids[member]) for member, names in enumerate(rank.names) for name in names]
        for nth, (name, table) in enumerate(places):
            for block_id in range(NUM_BLOCKS):
                held = rank.block(name, block_id)
                if block_id in table:
                    assert np.array_equal(held, values[table.index(block_id)][nth][rank.heads(layers[nth])])
                else:
                    assert (held == 255).all(), "a block was touched that was not named"
