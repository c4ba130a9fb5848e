"""The kernels, played by Triton's interpreter: on a GPU `tests/gpu/test_copy.py` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.hashing import checksum


@pytest.fixture(scope="module")
def xxh3() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # Read where the kernels are declared.
        from vllm_plugin.copy import xxh3

        yield xxh3


def checksums(xxh3: ModuleType, chunks: np.ndarray) -> list[int]:
    accumulators = xxh3.Hasher(torch.device("cpu")).accumulate(torch.from_numpy(chunks))
    return list(xxh3.finish(accumulators.numpy().view(np.uint64), chunks.shape[1]))


@pytest.mark.parametrize("num_bytes", [248, 256, 1016, 1024, 1032, 1088, 8192, 8200, 9208, 20_000, 1 << 17])
def test_they_compute_what_the_library_computes(xxh3: ModuleType, num_bytes: int) -> None:
    chunks = np.random.default_rng(num_bytes).integers(0, 256, (3, num_bytes), np.uint8)
    assert xxh3.Hasher.suits(num_bytes)
    assert checksums(xxh3, chunks) == [checksum(chunk) for chunk in chunks]


@settings(max_examples=20)
@given(num_words=st.integers(31, 600), seed=st.integers(0, 1 << 32))
def test_whatever_the_size(xxh3: ModuleType, num_words: int, seed: int) -> None:
    chunks = np.random.default_rng(seed).integers(0, 256, (2, 8 * num_words), np.uint8)
    assert checksums(xxh3, chunks) == [checksum(chunk) for chunk in chunks]


def test_extreme_words_carry(xxh3: ModuleType) -> None:
    chunks = np.stack([np.full(4096, byte, np.uint8) for byte in (0x00, 0x7F, 0x80, 0xFF)])
    assert checksums(xxh3, chunks) == [checksum(chunk) for chunk in chunks]


@pytest.mark.parametrize("num_bytes", [8, 240, 247, 250, 1001])
def test_sizes_that_are_left_to_the_library(xxh3: ModuleType, num_bytes: int) -> None:
    assert not xxh3.Hasher.suits(num_bytes)
