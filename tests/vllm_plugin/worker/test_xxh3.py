"""The kernels, played by Triton's interpreter: on a GPU `tests/gpu/test_copy.py` runs them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvpool.protocol.hashing import checksum

SIZES = (248, 256, 1016, 1024, 1032, 1088, 4096, 4104, 4800, 8192, 8200, 9208, 20_000)
"""Around the library's stripes of 64 bytes and its blocks of 1,024."""
Checksums = Callable[[np.ndarray], list[int]]


def _checksums(chunks: np.ndarray) -> list[int]:
    from vllm_plugin.worker.copy import xxh3

    assert xxh3.suits(chunks.shape[1])
    room = torch.empty(xxh3.room_words(*chunks.shape), dtype=torch.int64)
    hashing = xxh3.Hashing(xxh3.secret_table(torch.device("cpu")), torch.from_numpy(chunks), room)
    hashing.start()
    return list(xxh3.finish(hashing.accumulators.numpy().view(np.uint64), chunks.shape[1]))


@pytest.fixture
def checksums(interpreter: Callable[..., list[int]]) -> Checksums:
    """The kernels' checksums of uint8 [count, chunk bytes]."""
    return lambda chunks: interpreter(_checksums, chunks)


@pytest.mark.parametrize("num_bytes", [*SIZES, 1 << 17])
def test_they_compute_what_the_library_computes(checksums: Checksums, num_bytes: int) -> None:
    chunks = np.random.default_rng(num_bytes).integers(0, 256, (3, num_bytes), np.uint8)
    assert checksums(chunks) == [checksum(chunk) for chunk in chunks]


def test_extreme_words_carry(checksums: Checksums) -> None:
    chunks = np.stack([np.full(4096, byte, np.uint8) for byte in (0x00, 0x7F, 0x80, 0xFF)])
    assert checksums(chunks) == [checksum(chunk) for chunk in chunks]


@pytest.mark.parametrize("num_bytes", [8, 240, 247, 250, 1001])
def test_sizes_that_are_left_to_the_library(num_bytes: int) -> None:
    from vllm_plugin.worker.copy import xxh3

    assert not xxh3.suits(num_bytes)
