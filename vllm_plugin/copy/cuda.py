"""Copies on a GPU: blocks are gathered or scattered on the device, and cross the bus straight from or to the pool.

Shared memory is registered with CUDA (pinned) in the background; until it is, and for buffers that lie elsewhere, bytes
take one step more, through pinned staging. Each direction has streams and staging of its own: one batch crosses the bus
while another is gathered or scattered, and hashed, so that neither waits for the other nor for the model.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from kvpool.client import Checksums
from kvpool.transport.base import Buffers
from vllm_plugin.copy import BlockIds, xxh3
from vllm_plugin.copy.paged import PagedBlocks
from vllm_plugin.layout import Layout

logger = init_logger("vllm.kvpool.copy")

STAGING_BYTES = 32 << 20
NUM_SLOTS = 2
REGISTER_STEP_BYTES = 1 << 30


class CudaCopier:
    """See `Copier`."""

    batch_bytes = STAGING_BYTES

    def __init__(self, layouts: Sequence[Layout]):
        self._layouts = layouts
        self._blocks = [PagedBlocks(layout) for layout in layouts]
        self._device = layouts[0].parts[0].view.device
        staging_bytes = max(STAGING_BYTES, *(layout.region_bytes for layout in layouts))
        self._out = _Lane(self._device, staging_bytes)
        self._in = _Lane(self._device, staging_bytes)
        self._arriving: list[_Batch] = []
        self._hasher = xxh3.Hasher(self._device)
        # Compiled now: the first request should not wait for that.
        for blocks in self._blocks:
            blocks.compile()
        for chunk_bytes in {layout.chunk_bytes for layout in layouts if self._hasher.suits(layout.chunk_bytes)}:
            self._hasher.accumulate(torch.zeros(1, chunk_bytes, dtype=torch.uint8, device=self._device))
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
        layout, slot, batch = self._layouts[group_idx], self._out.next_slot(), _Batch()
        rows = slot.rows(len(buffers), layout.region_bytes)
        with self._out.kernels(mark, slot.free):
            self._blocks[group_idx].gather(self._ids(block_ids), rows)
            batch.hash(self._hasher, rows, layout.chunk_bytes)
            gathered = torch.cuda.Event()
            gathered.record()
        stretches = self._borrow(batch, buffers)
        with self._out.copies(gathered):
            for stretch in stretches:
                part = rows[stretch.start : stretch.stop].view(-1)
                torch.from_numpy(stretch.memory).copy_(part, non_blocking=True)
            if not stretches:
                host = slot.host_rows(*rows.shape)
                host.copy_(rows, non_blocking=True)
            slot.free.record()
            batch.done.record()
        if not stretches:
            batch.wait()
            for row, buffer in zip(host.numpy(), buffers, strict=True):
                buffer[:] = row
        return batch.checksums()

    def scatter(
        self, mark: torch.cuda.Event, group_idx: int, block_ids: BlockIds, buffers: Buffers
    ) -> Checksums | None:
        layout, slot, batch = self._layouts[group_idx], self._in.next_slot(), _Batch()
        rows = slot.rows(len(buffers), layout.region_bytes)
        stretches = self._borrow(batch, buffers)
        if not stretches:
            slot.free.synchronize()
            host = slot.host_rows(*rows.shape)
            for row, buffer in zip(host.numpy(), buffers, strict=True):
                row[:] = buffer
        with self._in.copies(slot.free):
            for stretch in stretches:
                part = rows[stretch.start : stretch.stop].view(-1)
                part.copy_(torch.from_numpy(stretch.memory), non_blocking=True)
            if not stretches:
                rows.copy_(host, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        with self._in.kernels(mark, arrived):
            self._blocks[group_idx].scatter(self._ids(block_ids), rows)
            batch.hash(self._hasher, rows, layout.chunk_bytes)
            slot.free.record()
            batch.done.record()
        self._arriving.append(batch)
        return batch.checksums()

    def settle(self) -> None:
        while self._arriving:
            self._arriving.pop().wait()

    def _ids(self, block_ids: BlockIds) -> torch.Tensor:
        """int64 [members, blocks], on the device. Pinned: the copy of pageable memory would be waited for."""
        return torch.from_numpy(np.asarray(block_ids, np.int64)).pin_memory().to(self._device, non_blocking=True)

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
    """Buffers [start, stop) of a batch that follow each other in memory: one copy moves them all.

    Args:
        memory: theirs, uint8.
    """

    start: int
    stop: int
    memory: npt.NDArray[np.uint8]


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
        bounds = [0, len(offsets)]
        for idx, (before, offset) in enumerate(itertools.pairwise(offsets), 1):
            # CUDA copies from and to one registration at a time.
            if offset != before + nbytes or offset // REGISTER_STEP_BYTES != before // REGISTER_STEP_BYTES:
                bounds.insert(-1, idx)
        return [
            Stretch(start, stop, self.memory[offsets[start] : offsets[stop - 1] + nbytes])
            for start, stop in itertools.pairwise(bounds)
        ]

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


class _Lane:
    """One direction: a stream for the bus, one for kernels, and slots that batches pass through in turn."""

    def __init__(self, device: torch.device, nbytes: int):
        self._device = device
        self._copies, self._kernels = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._slots = itertools.cycle([_Slot(device, nbytes) for _ in range(NUM_SLOTS)])

    def next_slot(self) -> _Slot:
        torch.cuda.set_device(self._device)  # Threads start on device 0.
        return next(self._slots)

    def copies(self, *after: torch.cuda.Event) -> torch.cuda.StreamContext:
        """What is begun inside crosses the bus."""
        return _behind(self._copies, after)

    def kernels(self, *after: torch.cuda.Event) -> torch.cuda.StreamContext:
        """What is begun inside runs on the device."""
        return _behind(self._kernels, after)


def _behind(stream: torch.cuda.Stream, after: Sequence[torch.cuda.Event]) -> torch.cuda.StreamContext:
    for event in after:
        stream.wait_event(event)
    return torch.cuda.stream(stream)


class _Slot:
    """Device and pinned memory for one batch.

    Attributes:
        free: when its last batch has left it.
    """

    def __init__(self, device: torch.device, nbytes: int):
        self._staged = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._host: torch.Tensor | None = None
        self.free = torch.cuda.Event()

    def rows(self, count: int, nbytes: int) -> torch.Tensor:
        """Device memory [count, nbytes]; what it held before is overwritten."""
        assert count * nbytes <= self._staged.numel(), f"a batch of {count} blocks with {nbytes} bytes is too large"
        return self._staged[: count * nbytes].view(count, nbytes)

    def host_rows(self, count: int, nbytes: int) -> torch.Tensor:
        """Pinned memory [count, nbytes]."""
        if self._host is None:
            self._host = torch.empty(self._staged.shape, dtype=torch.uint8, pin_memory=True)
        return self._host[: count * nbytes].view(count, nbytes)


class _Batch:
    """Blocks that are being copied.

    Attributes:
        done: when they have arrived.
        pinned: what was borrowed for them.
    """

    def __init__(self) -> None:
        self._chunk_bytes = 0
        self._sums: torch.Tensor | None = None
        self.done = torch.cuda.Event(blocking=True)
        self.pinned: PinnedMemory | None = None

    def hash(self, hasher: xxh3.Hasher, rows: torch.Tensor, chunk_bytes: int) -> None:
        """Hashes what is staged, on the current stream."""
        if hasher.suits(chunk_bytes):
            self._chunk_bytes = chunk_bytes
            accumulators = hasher.accumulate(rows.view(-1, chunk_bytes))
            self._sums = torch.empty(accumulators.shape, dtype=torch.int64, pin_memory=True)
            self._sums.copy_(accumulators, non_blocking=True)

    def wait(self) -> None:
        """Returns when the blocks have arrived. Idempotent."""
        self.done.synchronize()
        pinned, self.pinned = self.pinned, None
        if pinned is not None:
            pinned.give_back()

    def checksums(self) -> Checksums | None:
        """What was hashed; None, and the blocks have arrived, if that is left to the caller."""
        if self._sums is None:
            self.wait()
            return None
        return self._finish

    def _finish(self) -> list[int]:
        self.wait()
        assert self._sums is not None
        return xxh3.finish(self._sums.numpy().view(np.uint64), self._chunk_bytes)
