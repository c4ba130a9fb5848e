"""xxh3-64 of many chunks on a GPU: the same checksum that any CPU computes with the xxhash library.

A chunk is hashed in three steps. `_sum_stripes` adds up the stripes of each kilobyte: sums commute, so that all of them
are computed at once, and this is where the bytes are read. `_scramble` walks the kilobytes of a chunk in order, with 64
bytes of sums for each. The last few multiplications are done on the host.

Source: the XXH3 algorithm, version 0.8 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), default secret, seed 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

MIN_BYTES = 241
"""Shorter inputs are hashed in another way, which is not worth a kernel."""
WORD_BYTES = 8

_LANES = 8
_STRIPES = 16
_BLOCK_WORDS = _LANES * _STRIPES
_BLOCK_BYTES = _BLOCK_WORDS * WORD_BYTES
_TILE_BLOCKS = 8
_UNROLL = 16

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_INITIAL = (_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1)
_AVALANCHE = 0x165667919E3779F9


def _secret_words(first_byte: int, count: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(_SECRET, np.uint64, count, first_byte)


def secret_table(device: torch.device) -> torch.Tensor:
    """What `Hashing` on a device reads, int64.

    Words of the secret, the ones it is scrambled with, those of the last stripe, and the first accumulators.
    """
    stripes = _secret_words(0, _STRIPES - 1 + _LANES)
    scramble, last = _secret_words(len(_SECRET) - 64, _LANES), _secret_words(len(_SECRET) - 64 - 7, _LANES)
    table = np.concatenate([stripes, np.zeros(1, np.uint64), scramble, last, np.array(_INITIAL, np.uint64)])
    return torch.from_numpy(table.view(np.int64)).to(device)


def suits(chunk_bytes: int) -> bool:
    """Whether chunks of this size can be hashed here."""
    return chunk_bytes >= MIN_BYTES and chunk_bytes % WORD_BYTES == 0


def room_words(count: int, chunk_bytes: int) -> int:
    """Words that `Hashing` needs for so many chunks of this size; 0 if they cannot be hashed here."""
    return count * (_num_blocks(chunk_bytes) + 2) * _LANES if suits(chunk_bytes) else 0


class Hashing:
    """Hashes the chunks that lie in some memory of a device, again and again.

    Args:
        table: the device's `secret_table`.
        chunks: uint8 [count, chunk bytes], contiguous, aligned to words.
        room: int64 [at least `room_words`], on the same device.

    Attributes:
        accumulators: int64 [count, 8], for `finish`.
    """

    def __init__(self, table: torch.Tensor, chunks: torch.Tensor, room: torch.Tensor):
        self._count, nbytes = chunks.shape
        self._table = table
        self._words = chunks.view(torch.int64)
        self._num_words = nbytes // WORD_BYTES
        self._num_blocks = _num_blocks(nbytes)
        self._num_stripes = (nbytes - 1 - self._num_blocks * _BLOCK_BYTES) // 64  # Of the last, which is not whole.
        self.accumulators = room[: self._count * _LANES].view(-1, _LANES)
        self._sums = room[self.accumulators.numel() :][: self._count * (self._num_blocks + 1) * _LANES]

    def start(self) -> None:
        """Starts hashing on the current stream."""
        tiles = triton.cdiv(self._num_blocks + 1, _TILE_BLOCKS)
        _sum_stripes[(self._count, tiles)](
            self._words, self._table, self._sums, self._num_words, self._num_blocks, self._num_stripes,
            _STRIPES, _LANES, _TILE_BLOCKS, num_warps=4,
        )  # fmt: skip
        _scramble[(self._count,)](
            self._words, self._table, self._sums, self.accumulators, self._num_words, self._num_blocks,
            _LANES, _UNROLL, _PRIME32_1, num_warps=1,
        )  # fmt: skip


def _num_blocks(chunk_bytes: int) -> int:
    """Whole blocks before the last one."""
    return (chunk_bytes - 1) // _BLOCK_BYTES


def finish(accumulators: npt.NDArray[np.uint64], nbytes: int) -> list[int]:
    """The checksums of chunks of `nbytes`, from their accumulators [count, 8]."""
    with np.errstate(over="ignore"):
        result = np.full(len(accumulators), nbytes * _PRIME64_1 & (1 << 64) - 1, np.uint64)
        keyed = accumulators ^ _secret_words(11, _LANES)
        for lane in range(0, _LANES, 2):
            result += _fold(keyed[:, lane], keyed[:, lane + 1])
        result ^= result >> np.uint64(37)
        result *= np.uint64(_AVALANCHE)
        result ^= result >> np.uint64(32)
    return [int(each) for each in result]


def _fold(one: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The two halves of 128-bit products, xored."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    low, high = one & mask, one >> half
    other_low, other_high = other & mask, other >> half
    cross = (low * other_low >> half) + (high * other_low & mask) + low * other_high
    upper = (high * other_low >> half) + (cross >> half) + high * other_high
    upper ^= cross << half | low * other_low & mask
    return upper


@triton.jit  # type: ignore[untyped-decorator]
def _contribution(data, swapped, key):  # type: ignore[no-untyped-def]
    mixed = (data ^ key).to(tl.uint64, bitcast=True)
    return swapped.to(tl.uint64, bitcast=True) + (mixed & 0xFFFFFFFF) * (mixed >> 32)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_stripes(  # type: ignore[no-untyped-def]
    words, table, sums, chunk_words, num_blocks, num_stripes,
    stripes: tl.constexpr, lanes: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """For `tile` blocks of one chunk: what their stripes add to the accumulators."""
    chunk = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * tile + tl.arange(0, tile)[:, None, None]
    stripe = tl.arange(0, stripes)[None, :, None]
    lane = tl.arange(0, lanes)[None, None, :]
    there = (block < num_blocks) | ((block == num_blocks) & (stripe < num_stripes))
    at = words + chunk * chunk_words + block * (stripes * lanes) + stripe * lanes
    data = tl.load(at + lane, mask=there, other=0)
    swapped = tl.load(at + (lane ^ 1), mask=there, other=0)
    key = tl.load(table + stripe + lane)
    added = tl.where(there, _contribution(data, swapped, key), 0)
    total = tl.sum(added.to(tl.int64, bitcast=True), axis=1)
    row = tl.program_id(1) * tile + tl.arange(0, tile)[:, None]
    column = tl.arange(0, lanes)[None, :]
    tl.store(sums + (chunk * (num_blocks + 1) + row) * lanes + column, total, mask=row <= num_blocks)


@triton.jit  # type: ignore[untyped-decorator]
def _scramble(  # type: ignore[no-untyped-def]
    words, table, sums, result, chunk_words, num_blocks,
    lanes: tl.constexpr, unroll: tl.constexpr, prime: tl.constexpr,
):  # fmt: skip
    """One chunk: folds the sums of its blocks in order, and its last stripe."""
    chunk = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, lanes)
    secret = tl.load(table + 24 + lane).to(tl.uint64, bitcast=True)
    last_secret = tl.load(table + 32 + lane)
    total = tl.load(table + 40 + lane).to(tl.uint64, bitcast=True)
    at = sums + chunk * (num_blocks + 1) * lanes + lane
    for first in range(0, num_blocks, unroll):
        for nth in tl.static_range(unroll):  # Unrolled, so that loads run ahead of the chain of multiplications.
            inside = first + nth + 0 * lane < num_blocks
            added = tl.load(at + (first + nth) * lanes, mask=inside, other=0).to(tl.uint64, bitcast=True)
            mixed = total + added
            mixed = (mixed ^ (mixed >> 47) ^ secret) * prime
            total = tl.where(inside, mixed, total)
    total += tl.load(at + num_blocks * lanes).to(tl.uint64, bitcast=True)
    end = words + (chunk + 1) * chunk_words - lanes
    total += _contribution(tl.load(end + lane), tl.load(end + (lane ^ 1)), last_secret)
    tl.store(result + chunk * lanes + lane, total.to(tl.int64, bitcast=True))
