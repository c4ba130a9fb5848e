"""Blocks of the engine's paged KV cache to and from contiguous rows, on a GPU, all layers that look alike at once.

A launch takes the engine's process longer than the device takes for the bytes, so that layers are found in a table of
addresses on the device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from vllm_plugin.worker.copy import Layout, Part

_TILE_WORDS = 2048
_NUM_WARPS = 4


class PagedBlocks:
    """The blocks of one group on one device.

    Args:
        layout: whose views stay where they are.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        word_bytes = 8 if all(_has_words(layout, part) for part in layout.parts) else 1
        self._dtype = torch.int64 if word_bytes == 8 else torch.uint8
        alike: dict[object, list[Part]] = {}
        for part in layout.parts:
            alike.setdefault((part.view.shape, part.view.stride()), []).append(part)
        self._likes = [_Like.of(layout, parts, word_bytes) for parts in alike.values()]

    def compile(self) -> None:
        """Compiles the kernels for a CUDA device: the first request should not wait for that."""
        ids = torch.zeros(0, 0, dtype=torch.int64, device=self._likes[0].table.device)
        words = self.words(torch.empty(0, self.layout.region_bytes, dtype=torch.uint8, device=ids.device))
        for like, gather in itertools.product(self._likes, (True, False)):
            _move.warmup(*self._arguments(like, ids, words, gather), num_warps=_NUM_WARPS, grid=(1,))

    def words(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of bytes, uint8 [count, region bytes], on the device, contiguous and aligned to words, as is copied."""
        nbytes = self.layout.region_bytes
        assert rows.shape[1] == nbytes, f"rows of {rows.shape[1]} bytes for {nbytes}"
        return rows.view(self._dtype)

    def gather(self, ids: torch.Tensor, words: torch.Tensor) -> None:
        """Starts copying blocks into rows, on the current stream.

        Args:
            ids: int64 [members, count], on the device: which blocks.
            words: the rows, as `words` gives them.
        """
        self._move(ids, words, gather=True)

    def scatter(self, ids: torch.Tensor, words: torch.Tensor) -> None:
        """Starts copying rows into blocks; see `gather`."""
        self._move(ids, words, gather=False)

    def _move(self, ids: torch.Tensor, words: torch.Tensor, gather: bool) -> None:
        for like in self._likes:
            grid = (words.shape[0], like.num_parts, triton.cdiv(like.part_words, _TILE_WORDS))
            _move[grid](*self._arguments(like, ids, words, gather), num_warps=_NUM_WARPS)

    def _arguments(self, like: _Like, ids: torch.Tensor, words: torch.Tensor, gather: bool) -> tuple[Any, ...]:
        return (
            like.table, ids, words, *words.shape, like.chunk_words, like.part_words, like.block_stride,
            *like.sizes, *like.strides, _WORDS[self._dtype], _TILE_WORDS, gather,
        )  # fmt: skip


_WORDS = {torch.int64: tl.int64, torch.uint8: tl.uint8}


def _has_words(layout: Layout, part: Part) -> bool:
    view = part.view
    numbers = (layout.chunk_bytes, part.start, view.shape[-1], view.data_ptr(), *view.stride()[:-1])
    return all(number % 8 == 0 for number in numbers)


@dataclass(frozen=True, slots=True)
class _Like:
    """Parts of one shape and spacing.

    Args:
        table: int64 [parts, 3], on the device: address, first word in each chunk, block table.
        part_words: words of one part in one block.
        block_stride: words from a block to the next.
        sizes, strides: of a block's view, [S, L, H / S, r, N / r, C words].
    """

    table: torch.Tensor
    num_parts: int
    chunk_words: int
    part_words: int
    block_stride: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout, parts: list[Part], word_bytes: int) -> _Like:
        view = parts[0].view
        *sizes, content_bytes = view.shape[1:]
        block_stride, *strides, _ = (stride // word_bytes for stride in view.stride())
        rows = [(part.view.data_ptr(), part.start // word_bytes, part.member) for part in parts]
        return cls(
            torch.tensor(rows, dtype=torch.int64, device=view.device),
            len(parts),
            layout.chunk_bytes // word_bytes,
            view[0].numel() // word_bytes,
            block_stride,
            (*sizes, content_bytes // word_bytes),
            (*strides, 1),
        )


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    table, ids, rows, count, row_words, chunk_words, part_words, block_stride,
    size_s: tl.constexpr, size_l: tl.constexpr, size_h: tl.constexpr,
    size_r: tl.constexpr, size_n: tl.constexpr, size_c: tl.constexpr,
    stride_s: tl.constexpr, stride_l: tl.constexpr, stride_h: tl.constexpr,
    stride_r: tl.constexpr, stride_n: tl.constexpr, stride_c: tl.constexpr,
    word: tl.constexpr, tile: tl.constexpr, gather: tl.constexpr,
):  # fmt: skip
    """`tile` words of one part of one block."""
    nth = tl.program_id(0).to(tl.int64)
    entry = table + tl.program_id(1) * 3
    paged = tl.load(entry).to(tl.pointer_type(word))
    start = tl.load(entry + 1)
    block = tl.load(ids + tl.load(entry + 2) * count + nth)
    at = tl.program_id(2) * tile + tl.arange(0, tile)
    inside = at < part_words
    # From the place in the part to the place in the block's view, axis by axis.
    content, rest = at % size_c, at // size_c
    token, rest = rest % size_n, rest // size_n
    kernel_block, rest = rest % size_r, rest // size_r
    head, rest = rest % size_h, rest // size_h
    layer, shard = rest % size_l, rest // size_l
    here = (
        shard.to(tl.int64) * stride_s + layer.to(tl.int64) * stride_l + head.to(tl.int64) * stride_h
        + kernel_block.to(tl.int64) * stride_r + token.to(tl.int64) * stride_n + content * stride_c
    )  # fmt: skip
    shard_words: tl.constexpr = size_l * size_h * size_r * size_n * size_c
    there = shard.to(tl.int64) * chunk_words + start + at % shard_words
    in_block = paged + block * block_stride + here
    in_row = rows + nth * row_words + there
    if gather:
        tl.store(in_row, tl.load(in_block, mask=inside), mask=inside)
    else:
        tl.store(in_block, tl.load(in_row, mask=inside), mask=inside)
