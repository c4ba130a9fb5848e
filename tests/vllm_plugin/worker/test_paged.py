"""The kernel for all layers at once, played by Triton's interpreter: on a GPU `tests/gpu/test_copy.py` runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.vllm_plugin.worker.test_layout import LAYOUTS, NAMES, layout_of, numbered
from vllm_plugin.worker.copy import CpuCopier

MEMBERS = (NAMES[:2], NAMES[2:])  # Two of the engine's groups, with a block table each.
IDS, TARGETS = [[1, 4, 0], [0, 4, 2]], [[3, 0, 1], [1, 2, 0]]


def _gathered(source: str, dtype: torch.dtype, num_shards: int) -> np.ndarray:
    from vllm_plugin.worker.copy.paged import PagedBlocks

    layout = layout_of(LAYOUTS[source](numbered().to(dtype)), num_shards, MEMBERS)
    rows = torch.zeros(3, layout.region_bytes, dtype=torch.uint8)
    blocks = PagedBlocks(layout)
    blocks.gather(torch.tensor(IDS), blocks.words(rows))
    return rows.numpy()


def _scattered(source: str, dtype: torch.dtype, num_shards: int, rows: np.ndarray) -> list[np.ndarray]:
    from vllm_plugin.worker.copy.paged import PagedBlocks

    caches = LAYOUTS[source](torch.full_like(numbered(), -2).to(dtype))
    blocks = PagedBlocks(layout_of(caches, num_shards, MEMBERS))
    blocks.scatter(torch.tensor(TARGETS), blocks.words(torch.from_numpy(rows)))
    return [cache.numpy() for cache in caches.values()]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])  # Moved byte by byte, and in words of eight.
@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("source", LAYOUTS)
def test_it_moves_the_bytes_that_a_cpu_moves(
    interpreter: Callable[..., Any], source: str, dtype: torch.dtype, num_shards: int
) -> None:
    layout = layout_of(LAYOUTS[source](numbered().to(dtype)), num_shards, MEMBERS)
    expected = [np.zeros(layout.region_bytes, np.uint8) for _ in range(3)]
    CpuCopier([layout]).gather(None, 0, IDS, expected)
    rows = interpreter(_gathered, source, dtype, num_shards)
    assert [row.tobytes() for row in rows] == [row.tobytes() for row in expected]

    caches = LAYOUTS[source](torch.full_like(numbered(), -2).to(dtype))
    CpuCopier([layout_of(caches, num_shards, MEMBERS)]).scatter(None, 0, TARGETS, expected)
    scattered = interpreter(_scattered, source, dtype, num_shards, rows)
    for one, other in zip(scattered, caches.values(), strict=True):
        assert np.array_equal(one, other.numpy())
