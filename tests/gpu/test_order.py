"""Copies see what the device had been given by their mark, though it is far behind the host."""

import threading
import time

import numpy as np
import pytest
import torch

from tests.support.processes import wait_for
from vllm_plugin.worker.copy import make_layout

pytestmark = pytest.mark.gpu

NAMES, BLOCKS, IDS = ("a", "b"), 32, [3, 17, 5]
BEHIND_CYCLES = 500_000_000
"""A few tenths of a second."""


def _behind(cache: dict[str, torch.Tensor], value: int) -> None:
    """What a forward pass does: it is launched, and writes later."""
    torch.cuda._sleep(BEHIND_CYCLES)
    for kv in cache.values():
        kv.fill_(value)


@pytest.fixture
def cache() -> dict[str, torch.Tensor]:
    """Layers uint8 [blocks, heads, tokens, columns] of zeros, and kernels that are loaded: loading them would wait."""
    made = {name: torch.zeros(BLOCKS, 4, 16, 64, dtype=torch.uint8, device="cuda") for name in NAMES}
    torch.cuda._sleep(1)
    for kv in made.values():
        kv.fill_(0)
    torch.cuda.synchronize()
    return made


@pytest.mark.parametrize(("marked", "seen"), [("after", 7), ("before", 0)])
def test_bug_11_kv_is_read_when_it_has_been_computed(marked: str, seen: int, cache: dict[str, torch.Tensor]) -> None:
    from vllm_plugin.worker.copy.cuda import CudaCopier

    layout = make_layout(cache, [NAMES], BLOCKS, 2)
    copier = CudaCopier([layout])
    buffers = [np.full(layout.region_bytes, 255, np.uint8) for _ in IDS]
    copier.gather(copier.mark(), 0, [IDS], buffers)  # Kernels are loaded; the next copy takes no time.
    torch.cuda.synchronize()
    mark = copier.mark()
    _behind(cache, 7)
    if marked == "after":
        mark = copier.mark()
    copier.gather(mark, 0, [IDS], buffers)
    assert all((buffer == seen).all() for buffer in buffers)


@pytest.mark.parametrize(("marked", "left"), [("after", 9), ("before", 0)])
def test_bug_10_loads_come_after_zeroing(marked: str, left: int, cache: dict[str, torch.Tensor]) -> None:
    from vllm_plugin.worker.copy.cuda import CudaCopier

    layout = make_layout(cache, [NAMES], BLOCKS, 2)
    copier = CudaCopier([layout])
    buffers = [np.full(layout.region_bytes, 9, np.uint8) for _ in IDS]
    copier.scatter(copier.mark(), 0, [IDS], buffers)
    copier.wait_scattered()
    torch.cuda.synchronize()
    mark = copier.mark()
    _behind(cache, 0)
    if marked == "after":
        mark = copier.mark()
    copier.scatter(mark, 0, [IDS], buffers)
    copier.wait_scattered()
    torch.cuda.synchronize()
    others = [block for block in range(BLOCKS) if block not in IDS]
    for kv in cache.values():
        assert (kv[IDS] == left).all() and (kv[others] == 0).all()


def test_how_long_a_load_has_waited_for_the_device_is_known(cache: dict[str, torch.Tensor]) -> None:
    from vllm_plugin.worker.copy.cuda import CudaCopier

    copier = CudaCopier([make_layout(cache, [NAMES], BLOCKS, 2)])
    reached = copier.mark()
    torch.cuda.synchronize()
    began_at, now = time.perf_counter(), copier.now()
    _behind(cache, 7)
    mark = copier.mark()
    assert copier.seconds_between(now, mark) == 0, "it is not known yet"
    torch.cuda.synchronize()
    waited_s = time.perf_counter() - began_at
    assert 0.9 * waited_s <= copier.seconds_between(now, mark) <= waited_s
    assert copier.seconds_between(now, reached) == 0, "it was reached before"


def test_a_load_far_ahead_of_the_device_leaves_the_engine_its_lock(cache: dict[str, torch.Tensor]) -> None:
    """The driver takes about a thousand calls ahead; in the next one a thread waits, with Python's lock."""
    from vllm_plugin.worker.copy.cuda import CudaCopier

    layout = make_layout(cache, [NAMES], BLOCKS, 2)
    copier = CudaCopier([layout])
    memory = np.full(BLOCKS * layout.region_bytes, 9, np.uint8)
    rows = list(memory.reshape(BLOCKS, -1))
    copier.adopt(memory)
    wait_for(lambda: copier._pinned._registered_bytes == memory.nbytes, "the memory to be pinned", 30)
    copier.scatter(copier.mark(), 0, [IDS], [rows[block] for block in IDS])
    copier.wait_scattered()
    _behind(cache, 0)
    mark, longest_s = copier.mark(), 0.0

    def load() -> None:
        for _ in range(200):
            copier.scatter(mark, 0, [IDS], [rows[block] for block in IDS])
        copier.wait_scattered()

    thread = threading.Thread(target=load)
    thread.start()
    while thread.is_alive():
        began_at = time.perf_counter()
        time.sleep(0.001)
        longest_s = max(longest_s, time.perf_counter() - began_at)
    torch.cuda.synchronize()
    assert longest_s < 0.1, "a part of the time in which the device was busy"
    assert all((kv[IDS] == 9).all() for kv in cache.values())
