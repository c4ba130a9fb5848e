"""Copies on a GPU: blocks are gathered or scattered on the device, and cross the bus straight from or to the pool.

Shared memory is registered with CUDA (pinned) in the background; until it is, and for buffers that lie elsewhere, bytes
take one step more, through pinned staging. Each direction has streams and staging of its own: one batch crosses the bus
while another is gathered or scattered, and hashed, so that neither waits for the other nor for the model.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from kvpool.sums import Checksums
from kvpool.transport.base import Buffers
from vllm_plugin.worker.copy import BlockIds, driver, xxh3
from vllm_plugin.worker.copy.paged import PagedBlocks
from vllm_plugin.worker.layout import Layout

logger = init_logger("vllm.kvpool.copy")

STAGING_BYTES = 32 << 20
NUM_SLOTS = 2
MAX_NOTES = 128
MAX_STAGES = 128
COPIES_A_TURN = 64
REGISTER_STEP_BYTES = 1 << 30


class CudaCopier:
    """See `Copier`."""

    batch_bytes = STAGING_BYTES
    head_blocks = 64

    def __init__(self, layouts: Sequence[Layout]):
        self._device = layouts[0].parts[0].view.device
        self._shapes = [_Shape(layout) for layout in layouts]
        staging_bytes = max(STAGING_BYTES, *(layout.region_bytes for layout in layouts))
        hasher = xxh3.Hasher(self._device)
        self._out = _Lane(self._device, self._shapes, hasher, staging_bytes)
        self._in = _Lane(self._device, self._shapes, hasher, staging_bytes)
        self._arriving: list[_Batch] = []
        # Compiled now: the first request should not wait for that.
        for group_idx, shape in enumerate(self._shapes):
            shape.blocks.compile()
            self._out.next_slot().stage(group_idx, 1).hash()
        torch.cuda.current_stream(self._device).synchronize()
        self._pinned: PinnedMemory | None = None
        self._adopting = threading.Lock()

    def adopt(self, memory: npt.NDArray[np.uint8] | None) -> None:
        with self._adopting:
            if self._pinned is not None and self._pinned.memory is memory:
                return
            if self._pinned is not None:
                self._pinned.close()
            self._pinned = PinnedMemory(memory, self._device) if memory is not None else None

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def gather(self, mark: torch.cuda.Event, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> Checksums | None:
        lane, slot = self._out, self._out.next_slot()
        stage = slot.stage(group_idx, len(buffers))
        batch = _Batch(lane, stage, block_ids)
        driver.wait(lane.kernels, slot.free.handle)
        driver.wait(lane.kernels, mark.cuda_event)
        batch.send_ids()
        with torch.cuda.stream(lane.kernels_stream):
            stage.gather()
            stage.hash()
        batch.fetch_sums()
        slot.turn.record(lane.kernels)
        driver.wait(lane.copies, slot.turn.handle)
        stretches = self._borrow(batch, buffers)
        for at, stretch in stage.places(stretches):
            driver.copy_rows(
                lane.copies, stretch.address, stretch.step, at, stage.nbytes, stage.nbytes, stretch.count
            )  # fmt: skip
        if not stretches:
            host = slot.host_rows(*stage.rows.shape)
            driver.copy(lane.copies, host.data_ptr(), stage.address, host.numel())
        slot.free.record(lane.copies)
        batch.done.record(lane.copies)
        if not stretches:
            batch.wait()
            for row, buffer in zip(host.numpy(), buffers, strict=True):
                buffer[:] = row
        return batch.checksums()

    def scatter(
        self, mark: torch.cuda.Event, group_idx: int, block_ids: BlockIds, buffers: Buffers
    ) -> Checksums | None:
        lane, slot = self._in, self._in.next_slot()
        stage = slot.stage(group_idx, len(buffers))
        batch = _Batch(lane, stage, block_ids)
        driver.wait(lane.copies, slot.free.handle)
        stretches = self._borrow(batch, buffers)
        for at, stretch in stage.places(stretches):
            driver.copy_rows(
                lane.copies, at, stage.nbytes, stretch.address, stretch.step, stage.nbytes, stretch.count
            )  # fmt: skip
        if not stretches:
            slot.free.synchronize()
            host = slot.host_rows(*stage.rows.shape)
            for row, buffer in zip(host.numpy(), buffers, strict=True):
                row[:] = buffer
            driver.copy(lane.copies, stage.address, host.data_ptr(), host.numel())
        slot.turn.record(lane.copies)
        driver.wait(lane.kernels, slot.turn.handle)
        driver.wait(lane.kernels, mark.cuda_event)
        batch.send_ids()
        with torch.cuda.stream(lane.kernels_stream):
            stage.scatter()
            stage.hash()
        batch.fetch_sums()
        slot.free.record(lane.kernels)
        batch.done.record(lane.kernels)
        self._arriving.append(batch)
        return batch.checksums()

    def settle(self) -> None:
        while self._arriving:
            self._arriving.pop().wait()

    def _borrow(self, batch: _Batch, buffers: Buffers) -> list[Stretch]:
        """Where the buffers lie in pinned memory, which the batch gives back; nothing if they do not."""
        pinned = self._pinned
        stretches = pinned.borrow(buffers) if pinned is not None else None
        if stretches is None:
            return []
        batch.pinned = pinned
        return stretches


@dataclass(frozen=True, slots=True)
class Stretch:
    """Buffers of a batch that lie evenly spaced in memory: one copy moves them all.

    Args:
        start: of the first, in the batch.
        address: of the first.
        step: bytes from one to the next.
    """

    start: int
    count: int
    address: int
    step: int


def stretches_of(offsets: Sequence[int], nbytes: int, base: int) -> list[Stretch]:
    """Buffers of `nbytes` at `offsets` of memory that begins at `base`, in as few stretches as they lie in."""
    stretches = []
    start = 0
    while start < len(offsets):
        stop, step = start + 1, nbytes
        if stop < len(offsets) and nbytes <= offsets[stop] - offsets[start] <= driver.MAX_STEP_BYTES:
            step = offsets[stop] - offsets[start]
        # CUDA copies from and to one registration at a time.
        registration = offsets[start] // REGISTER_STEP_BYTES
        while (
            stop < len(offsets)
            and offsets[stop] - offsets[stop - 1] == step
            and offsets[stop] // REGISTER_STEP_BYTES == registration
        ):
            stop += 1
        stretches.append(Stretch(start, stop - start, base + offsets[start], step))
        start = stop
    return stretches


class PinnedMemory:
    """Memory that is registered with CUDA by a thread of its own, from its start on, and given back after its last use.

    Attributes:
        memory: uint8, contiguous.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], device: torch.device):
        self.memory = memory
        self._device = device
        self._start = memory.ctypes.data
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._registered_bytes = 0
        self._users = 1  # The thread, until it ends.
        self._closing = False
        threading.Thread(target=self._register, name="kvpool-pin", daemon=True).start()

    def borrow(self, buffers: Buffers) -> list[Stretch] | None:
        """Where buffers of one size can be copied to and from directly, until `give_back`; None if they cannot."""
        nbytes = len(buffers[0])
        offsets = [buffer.__array_interface__["data"][0] - self._start for buffer in buffers]
        with self._lock:
            if self._closing or not all(self._covers(offset, nbytes) for offset in offsets):
                return None
            self._users += 1
        return stretches_of(offsets, nbytes, self._start)

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            self._unregister_if_unused()

    def close(self) -> None:
        """No more is registered or borrowed; the last user gives the memory back to the system."""
        with self._lock:
            self._closing = True
            self._unregister_if_unused()

    def _covers(self, first: int, nbytes: int) -> bool:
        last = first + nbytes - 1
        return (
            first >= 0 and last < self._registered_bytes and first // REGISTER_STEP_BYTES == last // REGISTER_STEP_BYTES
        )

    def _register(self) -> None:
        torch.cuda.set_device(self._device)
        for at in range(0, self.memory.nbytes, REGISTER_STEP_BYTES):
            if self._closing:
                break
            nbytes = min(REGISTER_STEP_BYTES, self.memory.nbytes - at)
            error = torch.cuda.cudart().cudaHostRegister(self._start + at, nbytes, 0)
            if int(error) != 0:
                logger.warning("CUDA does not pin the pool's memory (%s): copies take one step more", error)
                break
            with self._lock:
                self._registered_bytes = at + nbytes
        else:
            logger.info("kvpool: %d bytes of the pool's memory are pinned", self.memory.nbytes)
        self.give_back()

    def _unregister_if_unused(self) -> None:
        if self._closing and self._users == 0:
            for at in range(0, self._registered_bytes, REGISTER_STEP_BYTES):
                torch.cuda.cudart().cudaHostUnregister(self._start + at)
            self._registered_bytes = 0


class _Shape:
    """How the blocks of one group lie in the engine and in a row."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.blocks = PagedBlocks(layout)
        self.num_tables = 1 + max(part.member for part in layout.parts)

    def room(self, nbytes: int) -> int:
        """Words that a batch of `nbytes` needs on the device besides itself."""
        count = nbytes // self.layout.region_bytes
        chunks = count * self.layout.num_shards
        return _even(count * self.num_tables) + xxh3.Hasher.room(chunks, self.layout.chunk_bytes)


class _Lane:
    """One direction: a stream for the bus, one for kernels, and slots that batches pass through in turn.

    Attributes:
        copies, kernels: the streams' handles.
    """

    def __init__(self, device: torch.device, shapes: Sequence[_Shape], hasher: xxh3.Hasher, nbytes: int):
        self._device = device
        self._copies_stream, self.kernels_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.copies, self.kernels = self._copies_stream.cuda_stream, self.kernels_stream.cuda_stream
        self._slots = itertools.cycle([_Slot(device, shapes, hasher, nbytes) for _ in range(NUM_SLOTS)])
        self._notes: list[torch.Tensor] = []
        self._thread_id = 0

    def next_slot(self) -> _Slot:
        if self._thread_id != threading.get_ident():
            torch.cuda.set_device(self._device)  # Threads start on device 0, and without a context.
            self._thread_id = threading.get_ident()
        return next(self._slots)

    def take_notes(self, count: int) -> torch.Tensor:
        """Pinned int64 [at least count], used before if possible."""
        notes = self._notes.pop() if self._notes else None
        if notes is None or notes.numel() < count:
            notes = torch.empty(1 << max(count - 1, 1).bit_length(), dtype=torch.int64, pin_memory=True)
        return notes

    def give_notes_back(self, notes: torch.Tensor) -> None:
        if len(self._notes) < MAX_NOTES:
            self._notes.append(notes)


class _Slot:
    """Device and pinned memory for one batch.

    Attributes:
        free: when its last batch has left it.
        turn: when its batch goes from one stream to the other.
    """

    def __init__(self, device: torch.device, shapes: Sequence[_Shape], hasher: xxh3.Hasher, nbytes: int):
        self._staged = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._shapes = shapes
        self._hasher = hasher
        self._watermark = torch.empty(max(shape.room(nbytes) for shape in shapes), dtype=torch.int64, device=device)
        self._host: torch.Tensor | None = None
        self._stages: dict[tuple[int, int], _Stage] = {}
        self.free = driver.Event()
        self.turn = driver.Event()

    def stage(self, group_idx: int, count: int) -> _Stage:
        """Itself as `count` blocks of a group; what it held before is overwritten."""
        stage = self._stages.get((group_idx, count))
        if stage is None:
            if len(self._stages) == MAX_STAGES:
                self._stages.clear()
            shape = self._shapes[group_idx]
            nbytes = count * shape.layout.region_bytes
            assert nbytes <= self._staged.numel(), f"a batch of {count} blocks with {nbytes} bytes is too large"
            stage = _Stage(self._staged[:nbytes].view(count, -1), shape, self._hasher, self._watermark)
            self._stages[group_idx, count] = stage
        return stage

    def host_rows(self, count: int, nbytes: int) -> torch.Tensor:
        """Pinned memory [count, nbytes]."""
        if self._host is None:
            self._host = torch.empty(self._staged.shape, dtype=torch.uint8, pin_memory=True)
        return self._host[: count * nbytes].view(count, nbytes)


class _Stage:
    """The memory of a slot as some blocks of one group.

    Attributes:
        rows: uint8 [count, region bytes].
        address: of the first.
        nbytes: of one.
        num_ids, num_sums: words that name the blocks, and words of their checksums.
        ids_address, sums_address: of these.
    """

    def __init__(self, rows: torch.Tensor, shape: _Shape, hasher: xxh3.Hasher, room: torch.Tensor):
        count = len(rows)
        self.rows = rows
        self.address = rows.data_ptr()
        self.nbytes = shape.layout.region_bytes
        self.chunk_bytes = shape.layout.chunk_bytes
        self._blocks = shape.blocks
        self._words = shape.blocks.words(rows)
        self.num_ids = shape.num_tables * count
        self._ids = room[: self.num_ids].view(-1, count)
        self.ids_address = self._ids.data_ptr()
        self._hashing = None
        self.num_sums = self.sums_address = 0
        if hasher.suits(self.chunk_bytes):
            self._hashing = hasher.prepare(rows.view(-1, self.chunk_bytes), room[_even(self.num_ids) :])
            self.num_sums = self._hashing.accumulators.numel()
            self.sums_address = self._hashing.accumulators.data_ptr()

    def places(self, stretches: Sequence[Stretch]) -> Iterator[tuple[int, Stretch]]:
        """Each stretch, and the address of its first row; now and then other threads have a turn."""
        for nth, stretch in enumerate(stretches):
            if nth % COPIES_A_TURN == COPIES_A_TURN - 1:
                time.sleep(0)  # The driver's calls keep Python's lock.
            yield self.address + stretch.start * self.nbytes, stretch

    def gather(self) -> None:
        """Starts copying blocks into the rows, on the current stream."""
        self._blocks.gather(self._ids, self._words)

    def scatter(self) -> None:
        self._blocks.scatter(self._ids, self._words)

    def hash(self) -> None:
        """Starts hashing the rows, on the current stream."""
        if self._hashing is not None:
            self._hashing.start()


class _Batch:
    """Blocks that are being copied.

    Attributes:
        done: when they have arrived.
        pinned: what was borrowed for them.
    """

    def __init__(self, lane: _Lane, stage: _Stage, block_ids: BlockIds):
        self._lane = lane
        self._stage = stage
        self._notes = lane.take_notes(stage.num_ids + stage.num_sums)
        self._address = self._notes.data_ptr()
        self._notes.numpy()[: stage.num_ids] = np.asarray(block_ids, np.int64).reshape(-1)
        self._found: list[int] | None = None
        self.done = driver.Event()
        self.pinned: PinnedMemory | None = None

    def send_ids(self) -> None:
        """Tells the device which blocks."""
        driver.copy(self._lane.kernels, self._stage.ids_address, self._address, 8 * self._stage.num_ids)

    def fetch_sums(self) -> None:
        """Has the device tell their checksums."""
        at = self._address + 8 * self._stage.num_ids
        if self._stage.num_sums:
            driver.copy(self._lane.kernels, at, self._stage.sums_address, 8 * self._stage.num_sums)

    def wait(self) -> None:
        """Returns when the blocks have arrived. Idempotent."""
        self.done.synchronize()
        pinned, self.pinned = self.pinned, None
        if pinned is not None:
            pinned.give_back()

    def checksums(self) -> Checksums | None:
        """What was hashed; None, and the blocks have arrived, if that is left to the caller."""
        if not self._stage.num_sums:
            self.wait()
            self._lane.give_notes_back(self._notes)
            return None
        return self._finish

    def _finish(self) -> list[int]:
        self.wait()
        if self._found is None:
            first, stop = self._stage.num_ids, self._stage.num_ids + self._stage.num_sums
            accumulators = self._notes.numpy()[first:stop].view(np.uint64).reshape(-1, 8)
            self._found = xxh3.finish(accumulators, self._stage.chunk_bytes)
            self._lane.give_notes_back(self._notes)  # Once: they are another batch's from now on.
        return self._found


def _even(words: int) -> int:
    """Kernels are compiled for what is aligned to two words."""
    return words + words % 2
