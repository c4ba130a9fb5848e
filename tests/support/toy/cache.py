"""The KV cache of one rank of a toy engine: any mix of groups over the same memory, every byte of it known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

Tables = Sequence[Sequence[int]]


def spec_of_rank(spec: Any, tp_size: int) -> Any:
    """A layer's spec as one of `tp_size` ranks has it."""
    if isinstance(spec, MambaSpec):
        (shape,) = spec.shapes
        return replace(spec, shapes=((shape[0] // tp_size, *shape[1:]),))
    return replace(spec, num_kv_heads=max(1, spec.num_kv_heads // tp_size))


def config_of_rank(config: KVCacheConfig, tp_size: int, stage: int = 0, num_stages: int = 1) -> KVCacheConfig:
    """The whole model's KV cache as one rank of a pipeline stage has it: its heads, and its share of the layers."""
    groups = []
    for group in config.kv_cache_groups:
        share = -(-len(group.layer_names) // num_stages)
        layers = group.layer_names[stage * share : (stage + 1) * share]
        groups.append(KVCacheGroupSpec(layers, spec_of_rank(group.kv_cache_spec, tp_size)))
    return replace(config, kv_cache_groups=groups)


def attended(spec: KVCacheSpec, start: int) -> int:
    """The first token that token `start` attends to."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, start - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return start // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


@dataclass(frozen=True, slots=True)
class Wrong:
    """KV of one layer that is not what attention must read.

    Args:
        first: token that it begins with.
        blocks: of each token.
        read, wanted: int32 [tokens, ...].
    """

    group_idx: int
    layer: str
    first: int
    blocks: list[int]
    read: torch.Tensor
    wanted: torch.Tensor
    _view: torch.Tensor
    _cells: Any

    def __str__(self) -> str:
        stop = self.first + len(self.blocks)
        where = f"group {self.group_idx}, layer {self.layer}, tokens {self.first} to {stop}"
        return f"{where}, in blocks {sorted(set(self.blocks))}"

    def mend(self) -> None:
        """Makes it what it must be, so that it is found once."""
        self._view[self._cells] = self.wanted


class ToyCache:
    """One rank's.

    Args:
        config: of this rank.
        whole: of the model, for the places of heads and layers in it.

    Attributes:
        layers: as vLLM registers them; layers of different groups are the same memory.
        memory: all of it, int32 [layers of a group, blocks, words].
    """

    def __init__(self, config: KVCacheConfig, whole: KVCacheConfig, tp_rank: int, tp_size: int):
        self._groups = config.kv_cache_groups
        self._whole = whole.kv_cache_groups
        self._tp = tp_rank, tp_size
        self._views: list[list[torch.Tensor]] = []
        self._places: dict[tuple[int, str], np.ndarray] = {}
        self.layers: dict[str, torch.Tensor] = {}
        num_layers = max(len(group.layer_names) for group in self._groups)
        # int32 and float32 are of one size, and integers compare exactly.
        words = max(self._words(group.kv_cache_spec) for group in self._groups) + 8  # What a page is padded with.
        self.memory = torch.full((num_layers, config.num_blocks, words), -1, dtype=torch.int32)
        for group in self._groups:
            spec: Any = group.kv_cache_spec
            views = []
            for nth, name in enumerate(group.layer_names):
                page = self.memory[nth, :, : self._words(spec)]
                if isinstance(spec, MambaSpec):
                    self.layers[name] = page.view(torch.int8)[:, None, None, :]
                else:
                    shape = (spec.num_kv_heads, spec.num_states, spec.head_size + spec.head_size_v)
                    page = self.layers[name] = page.unflatten(1, shape)
                views.append(page)
            self._views.append(views)

    def wrong(self, tables: Tables, hashes: Sequence[int], start: int) -> Iterator[Wrong]:
        """What of the KV that token `start` attends to is not of its prefix, layer by layer."""
        if start == 0:
            return
        for idx, (group, views) in enumerate(zip(self._groups, self._views, strict=True)):
            spec = group.kv_cache_spec
            first = start - 1 if isinstance(spec, MambaSpec) else attended(spec, start)
            cells, blocks = self._cells(spec, tables[idx], first, start)
            for name, view in zip(group.layer_names, views, strict=True):
                read, wanted = view[cells], self.expected(idx, name, hashes[first:start])
                if not (all(blocks) and torch.equal(read, wanted)):
                    yield Wrong(idx, name, first, blocks, read, wanted, view, cells)

    def write(self, tables: Tables, hashes: Sequence[int], start: int, stop: int) -> None:
        """What a forward pass over tokens [start, stop) leaves behind; a state is its last token's alone."""
        for idx, (group, views) in enumerate(zip(self._groups, self._views, strict=True)):
            spec = group.kv_cache_spec
            first = stop - 1 if isinstance(spec, MambaSpec) else start
            cells, blocks = self._cells(spec, tables[idx], first, stop)
            assert all(blocks), f"group {idx} has the null block among {blocks} for tokens {first} to {stop}"
            for name, view in zip(group.layer_names, views, strict=True):
                view[cells] = self.expected(idx, name, hashes[first:stop])

    def copy(self, src_block_id: int, dst_block_id: int) -> None:
        self.memory[:, dst_block_id] = self.memory[:, src_block_id]

    def _words(self, spec: Any) -> int:
        if isinstance(spec, MambaSpec):
            return prod(spec.shapes[0])
        return int(spec.num_kv_heads * spec.num_states * (spec.head_size + spec.head_size_v))

    @staticmethod
    def _cells(spec: KVCacheSpec, table: Sequence[int], first: int, stop: int) -> tuple[Any, list[int]]:
        """Index of tokens [first, stop), whose values are [tokens, H, C] or [tokens, state words]; each one's block."""
        positions = np.arange(first, stop)
        block_ids = np.asarray(table)[positions // spec.block_size]
        blocks = torch.from_numpy(block_ids)
        cells = blocks if isinstance(spec, MambaSpec) else (blocks, slice(None), positions % spec.block_size)
        return cells, block_ids.tolist()

    def expected(self, idx: int, name: str, hashes: Sequence[int]) -> torch.Tensor:
        """What the cache must hold for some tokens: int32 [tokens, H, C], or [tokens, state words]."""
        if (idx, name) not in self._places:
            self._places[idx, name] = self._place(idx, name)
        place = self._places[idx, name]
        mixed = np.asarray(hashes, np.uint64).reshape(-1, *[1] * place.ndim) * place
        return torch.from_numpy((mixed >> np.uint64(33)).astype(np.int32))

    def _place(self, idx: int, name: str) -> np.ndarray:
        """What tells a layer's words of one token apart: odd uint64 [H, C], or [state words]."""
        spec: Any = self._groups[idx].kv_cache_spec
        layer = self._whole[idx].layer_names.index(name)
        tp_rank, tp_size = self._tp
        if isinstance(spec, MambaSpec):
            place = np.arange(prod(spec.shapes[0])) + tp_rank * 524287
        else:
            replicas = max(1, tp_size // self._whole[idx].kv_cache_spec.num_kv_heads)  # type: ignore[attr-defined]
            head, column = np.ogrid[0 : spec.num_kv_heads, 0 : spec.head_size + spec.head_size_v]
            place = (head + tp_rank // replicas * spec.num_kv_heads) * 104729 + column * 31
        return 2 * (place + layer * 7919 + idx * 15485863 + 1).astype(np.uint64) + 1
