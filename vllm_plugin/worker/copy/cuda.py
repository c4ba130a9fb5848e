"""`CudaCopier`: blocks are gathered or scattered on the GPU, and cross the bus straight from or to the pool.

Shared memory is registered with CUDA (pinned) in the background; until it is, and for buffers that lie elsewhere, bytes
take one step more, through pinned staging. Each direction has streams and staging of its own: one copy crosses the bus
while another is gathered or scattered, and hashed, so that neither waits for the other nor for the model.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvpool.transport.base import Buffers
from kvpool.transport.chunk_sums import Checksums
from vllm_plugin.worker.copy import BlockIds, Copier, Layout, driver, xxh3
from vllm_plugin.worker.copy.driver import CudaHost, PinnedMemory, StridedRun
from vllm_plugin.worker.copy.paged import PagedBlocks

STAGING_BYTES = 32 << 20
"""Of one staging buffer."""
NUM_BUFFERS = 2
"""Staging buffers of each direction."""
MAX_IDLE_WORDS = 128
"""Pinned arrays of words, and events, that a direction keeps for later copies: making or ending one waits for a lock of
the driver that the engine's launches hold."""
MAX_STAGED_SIZES = 128
"""Views of a staging buffer that are kept for later copies of the same size."""
COPIES_BETWEEN_YIELDS = 64
"""Calls of the driver, which keep Python's lock, after which other threads may run."""
MAX_CALLS_AHEAD = 256
"""The driver takes about a thousand calls ahead of the device; then a call waits, and all of the engine with it,
since it keeps Python's lock. So a load gives the device this many, and waits for it with the lock released."""
CALLS_PER_COPY = 12
"""Of the driver, besides one for each run of neighbouring blocks."""


class CudaCopier(Copier):
    """Copies on streams of a GPU, and hashes there what is moved."""

    batch_bytes = STAGING_BYTES

    def __init__(self, layouts: Sequence[Layout]):
        self._device = layouts[0].parts[0].view.device
        groups = [PagedBlocks(layout) for layout in layouts]
        staging_bytes = max(STAGING_BYTES, *(layout.region_bytes for layout in layouts))
        table = xxh3.secret_table(self._device)
        self._out = _Direction(self._device, groups, table, staging_bytes)
        self._in = _Direction(self._device, groups, table, staging_bytes)
        self._sums = [xxh3.suits(layout.chunk_bytes) for layout in layouts]
        self._scatters: deque[_Copy] = deque()
        # Compiled now: the first request should not wait for that.
        for group_idx, blocks in enumerate(groups):
            blocks.compile()
            self._out.next_buffer().staged(group_idx, 1).hash()
        torch.cuda.current_stream(self._device).synchronize()
        self._pinned: PinnedMemory | None = None
        self._adopting = threading.Lock()

    def adopt(self, memory: npt.NDArray[np.uint8] | None) -> None:
        with self._adopting:
            if self._pinned is not None and self._pinned.memory is memory:
                return
            if self._pinned is not None:
                self._pinned.close()
            self._pinned = PinnedMemory(memory, CudaHost(self._device)) if memory is not None else None

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def now(self) -> torch.cuda.Event:
        self._in.enter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._in.kernels_stream)
        return event

    def seconds_between(self, earlier: torch.cuda.Event, mark: torch.cuda.Event) -> float:
        if not (earlier.query() and mark.query()):
            return 0.0
        return max(0.0, float(earlier.elapsed_time(mark)) / 1_000)

    def sums(self, group_idx: int) -> bool:
        return self._sums[group_idx]

    def gather(self, mark: torch.cuda.Event, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> Checksums | None:
        direction, staging = self._out, self._out.next_buffer()
        staged = staging.staged(group_idx, len(buffers))
        copy = _Copy(direction, staged, block_ids)
        driver.wait(direction.kernels, staging.free.handle)
        driver.wait(direction.kernels, mark.cuda_event)
        copy.send_ids()
        with torch.cuda.stream(direction.kernels_stream):
            staged.gather()
            staged.hash()
        copy.fetch_sums()
        staging.handover.record(direction.kernels)
        driver.wait(direction.copies, staging.handover.handle)
        runs = self._borrow(copy, buffers)
        for at, run in copy.places(runs):
            driver.copy_rows(direction.copies, run.address, run.step, at, staged.nbytes, staged.nbytes, run.count)
        if not runs:
            host = staging.host_rows(*staged.rows.shape)
            driver.copy(direction.copies, host.data_ptr(), staged.address, host.numel())
        staging.free.record(direction.copies)
        copy.done.record(direction.copies)
        if not runs:
            copy.wait()
            for row, buffer in zip(host.numpy(), buffers, strict=True):
                buffer[:] = row
        return copy.checksums()

    def scatter(
        self, mark: torch.cuda.Event, group_idx: int, block_ids: BlockIds, buffers: Buffers
    ) -> Checksums | None:
        direction, staging = self._in, self._in.next_buffer()
        staged = staging.staged(group_idx, len(buffers))
        copy = _Copy(direction, staged, block_ids)
        driver.wait(direction.copies, staging.free.handle)
        runs = self._borrow(copy, buffers)
        copy.num_calls += len(runs)
        while self._scatters and copy.num_calls + sum(each.num_calls for each in self._scatters) > MAX_CALLS_AHEAD:
            self._scatters.popleft().wait()
        for at, run in copy.places(runs):
            driver.copy_rows(direction.copies, at, staged.nbytes, run.address, run.step, staged.nbytes, run.count)
        if not runs:
            staging.free.synchronize()
            host = staging.host_rows(*staged.rows.shape)
            for row, buffer in zip(host.numpy(), buffers, strict=True):
                row[:] = buffer
            driver.copy(direction.copies, staged.address, host.data_ptr(), host.numel())
        staging.handover.record(direction.copies)
        driver.wait(direction.kernels, staging.handover.handle)
        driver.wait(direction.kernels, mark.cuda_event)
        copy.send_ids()
        with torch.cuda.stream(direction.kernels_stream):
            staged.scatter()
            staged.hash()
        copy.fetch_sums()
        staging.free.record(direction.kernels)
        copy.done.record(direction.kernels)
        self._scatters.append(copy)
        return copy.checksums()

    def wait_scattered(self) -> None:
        while self._scatters:
            self._scatters.popleft().wait()

    def _borrow(self, copy: _Copy, buffers: Buffers) -> list[StridedRun]:
        """Where the buffers lie in pinned memory, which the copy gives back; nothing if they do not."""
        pinned = self._pinned
        runs = pinned.borrow(buffers) if pinned is not None else []
        copy.borrowed = pinned if runs else None
        return runs


class _Direction:
    """Gather or scatter: a stream for the bus, one for kernels, and staging buffers that copies use in rotation.

    Attributes:
        copies, kernels: the streams' handles.
    """

    def __init__(self, device: torch.device, groups: Sequence[PagedBlocks], table: torch.Tensor, nbytes: int):
        self._device = device
        self._copies_stream, self.kernels_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.copies, self.kernels = self._copies_stream.cuda_stream, self.kernels_stream.cuda_stream
        self._buffers = itertools.cycle([_StagingBuffer(device, groups, table, nbytes) for _ in range(NUM_BUFFERS)])
        self._idle: list[tuple[torch.Tensor, driver.Event]] = []
        self._entered = threading.local()

    def enter(self) -> None:
        """See `driver.enter`; once a thread."""
        if not getattr(self._entered, "done", False):
            driver.enter(self._device)
            self._entered.done = True

    def next_buffer(self) -> _StagingBuffer:
        self.enter()
        return next(self._buffers)

    def borrow(self, count: int) -> tuple[torch.Tensor, driver.Event]:
        """Pinned int64 [at least count], and an event, used before if possible."""
        words, event = self._idle.pop() if self._idle else (None, driver.Event())
        if words is None or words.numel() < count:
            words = torch.empty(1 << max(count - 1, 1).bit_length(), dtype=torch.int64, pin_memory=True)
        return words, event

    def give_back(self, words: torch.Tensor, event: driver.Event) -> None:
        if len(self._idle) < MAX_IDLE_WORDS:
            self._idle.append((words, event))


class _StagingBuffer:
    """Device and pinned memory for one copy.

    Attributes:
        free: event when the last copy no longer needs the buffer.
        handover: event when the copy goes from one stream to the other.
    """

    def __init__(self, device: torch.device, groups: Sequence[PagedBlocks], table: torch.Tensor, nbytes: int):
        self._staged = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._groups = groups
        self._table = table
        scratch_words = max(_scratch_words(blocks, nbytes) for blocks in groups)
        self._scratch = torch.empty(scratch_words, dtype=torch.int64, device=device)
        self._host: torch.Tensor | None = None
        self._by_size: dict[tuple[int, int], _StagedBlocks] = {}
        self.free = driver.Event()
        self.handover = driver.Event()

    def staged(self, group_idx: int, count: int) -> _StagedBlocks:
        """The buffer as `count` blocks of a group; what it held before is overwritten."""
        staged = self._by_size.get((group_idx, count))
        if staged is None:
            if len(self._by_size) == MAX_STAGED_SIZES:
                self._by_size.clear()
            blocks = self._groups[group_idx]
            nbytes = count * blocks.layout.region_bytes
            assert nbytes <= self._staged.numel(), f"a copy of {count} blocks with {nbytes} bytes is too large"
            staged = _StagedBlocks(self._staged[:nbytes].view(count, -1), blocks, self._table, self._scratch)
            self._by_size[group_idx, count] = staged
        return staged

    def host_rows(self, count: int, nbytes: int) -> torch.Tensor:
        """Pinned memory [count, nbytes]."""
        if self._host is None:
            self._host = torch.empty(self._staged.shape, dtype=torch.uint8, pin_memory=True)
        return self._host[: count * nbytes].view(count, nbytes)


class _StagedBlocks:
    """A staging buffer as some blocks of one group.

    Attributes:
        rows: uint8 [count, region bytes].
        address: of the first row.
        nbytes: of one row.
        num_ids, num_sums: words that name the blocks, and words of their checksums.
        ids_address, sums_address: of these words on the device.
    """

    def __init__(self, rows: torch.Tensor, blocks: PagedBlocks, table: torch.Tensor, scratch: torch.Tensor):
        count = len(rows)
        self.rows = rows
        self.address = rows.data_ptr()
        self.nbytes = blocks.layout.region_bytes
        self.chunk_bytes = blocks.layout.chunk_bytes
        self._paged = blocks
        self._words = blocks.words(rows)
        self.num_ids = blocks.layout.num_tables * count
        self._ids = scratch[: self.num_ids].view(-1, count)
        self.ids_address = self._ids.data_ptr()
        self._hashing = None
        self.num_sums = self.sums_address = 0
        if xxh3.suits(self.chunk_bytes):
            chunks = rows.view(-1, self.chunk_bytes)
            self._hashing = xxh3.Hashing(table, chunks, scratch[_even(self.num_ids) :])
            self.num_sums = self._hashing.accumulators.numel()
            self.sums_address = self._hashing.accumulators.data_ptr()

    def gather(self) -> None:
        """Starts copying blocks into the rows, on the current stream."""
        self._paged.gather(self._ids, self._words)

    def scatter(self) -> None:
        self._paged.scatter(self._ids, self._words)

    def hash(self) -> None:
        """Starts hashing the rows, on the current stream."""
        if self._hashing is not None:
            self._hashing.start()


class _Copy:
    """Blocks that are being copied.

    Attributes:
        done: event when the blocks have arrived.
        borrowed: memory that the copy gives back once the blocks have arrived.
        num_calls: of the driver, about.
    """

    def __init__(self, direction: _Direction, staged: _StagedBlocks, block_ids: BlockIds):
        self._direction = direction
        self._blocks = staged
        self._host_words, self.done = direction.borrow(staged.num_ids + staged.num_sums)
        self._address = self._host_words.data_ptr()
        self._host_words.numpy()[: staged.num_ids] = np.asarray(block_ids, np.int64).reshape(-1)
        self._found: list[int] | None = None
        self._has_ended = False
        self.borrowed: PinnedMemory | None = None
        self.num_calls = CALLS_PER_COPY

    def places(self, runs: Sequence[StridedRun]) -> Iterator[tuple[int, StridedRun]]:
        """Each run, and the address of its first row, for a call that copies it; now and then other threads may run."""
        for nth, run in enumerate(runs):
            yield self._blocks.address + run.start * self._blocks.nbytes, run
            if nth % (MAX_CALLS_AHEAD // 2) == MAX_CALLS_AHEAD // 2 - 1:
                self.done.record(self._direction.copies)
                self.done.synchronize()
            elif nth % COPIES_BETWEEN_YIELDS == COPIES_BETWEEN_YIELDS - 1:
                time.sleep(0)  # The driver's calls keep Python's lock.

    def send_ids(self) -> None:
        """Starts sending the block ids to the device."""
        driver.copy(self._direction.kernels, self._blocks.ids_address, self._address, 8 * self._blocks.num_ids)

    def fetch_sums(self) -> None:
        """Starts fetching the checksums from the device."""
        at = self._address + 8 * self._blocks.num_ids
        if self._blocks.num_sums:
            driver.copy(self._direction.kernels, at, self._blocks.sums_address, 8 * self._blocks.num_sums)

    def wait(self) -> None:
        """Returns when the blocks have arrived. Idempotent, and for any thread."""
        if self._has_ended:
            return
        self._direction.enter()
        self.done.synchronize()
        borrowed, self.borrowed = self.borrowed, None
        if borrowed is not None:
            borrowed.give_back()

    def checksums(self) -> Checksums | None:
        """The checksums; None, once the blocks have arrived, if the caller must compute them."""
        if not self._blocks.num_sums:
            self.wait()
            self._end()
            return None
        return self._finish

    def _finish(self) -> list[int]:
        self.wait()
        if self._found is None:
            first, stop = self._blocks.num_ids, self._blocks.num_ids + self._blocks.num_sums
            accumulators = self._host_words.numpy()[first:stop].view(np.uint64).reshape(-1, 8)
            self._found = xxh3.finish(accumulators, self._blocks.chunk_bytes)
            self._end()
        return self._found

    def _end(self) -> None:
        """Once: words and event are another copy's from now on."""
        self._has_ended = True
        self._direction.give_back(self._host_words, self.done)


def _scratch_words(blocks: PagedBlocks, nbytes: int) -> int:
    """Words that a copy of `nbytes` needs on the device besides itself."""
    layout = blocks.layout
    count = nbytes // layout.region_bytes
    return _even(count * layout.num_tables) + xxh3.room_words(count * layout.num_shards, layout.chunk_bytes)


def _even(words: int) -> int:
    """Kernels are compiled for what is aligned to two words."""
    return words + words % 2
