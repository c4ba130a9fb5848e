"""Copies on a GPU: blocks are gathered or scattered on the device, and cross the bus straight from or to the pool.

Shared memory is registered with CUDA (pinned) in the background; until it is, and for buffers that lie elsewhere, bytes
take one step more, through pinned staging. Each direction has a stream and staging of its own, so that neither waits
for the other nor for the model.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from kvpool.transport.base import Buffers
from vllm_plugin.copy import BlockIds
from vllm_plugin.layout import Layout, Part

logger = init_logger("vllm.kvpool.copy")

STAGING_BYTES = 32 << 20
REGISTER_STEP_BYTES = 1 << 30


class CudaCopier:
    """See `Copier`."""

    batch_bytes = STAGING_BYTES

    def __init__(self, layouts: Sequence[Layout]):
        self._layouts = layouts
        self._parts = [[_Words.of(layout, part) for part in layout.parts] for layout in layouts]
        self._device = layouts[0].parts[0].view.device
        staging_bytes = max(STAGING_BYTES, *(layout.region_bytes for layout in layouts))
        self._out = _Lane(self._device, staging_bytes)
        self._in = _Lane(self._device, staging_bytes)
        self._pinned: PinnedMemory | None = None
        self._borrowed: list[PinnedMemory] = []  # By scatters that have not settled.
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

    def gather(self, mark: torch.cuda.Event, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> None:
        with self._out.after(mark):
            rows = self._out.device_rows(len(buffers), self._layouts[group_idx].region_bytes)
            ids = self._ids(block_ids)
            for words in self._parts[group_idx]:
                words.of_rows(rows).copy_(words.view.index_select(0, ids[words.member]))
            pinned = self._borrow(buffers)
            if pinned is not None:
                for row, buffer in zip(rows, buffers, strict=True):
                    torch.from_numpy(buffer).copy_(row, non_blocking=True)
                self._out.settle()
                pinned.give_back()
                return
            host = self._out.host_rows(*rows.shape)
            host.copy_(rows, non_blocking=True)
            self._out.settle()
        for row, buffer in zip(host.numpy(), buffers, strict=True):
            buffer[:] = row

    def scatter(self, mark: torch.cuda.Event, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> None:
        with self._in.after(mark):
            rows = self._in.device_rows(len(buffers), self._layouts[group_idx].region_bytes)
            pinned = self._borrow(buffers)
            if pinned is not None:
                self._borrowed.append(pinned)
                for row, buffer in zip(rows, buffers, strict=True):
                    row.copy_(torch.from_numpy(buffer), non_blocking=True)
            else:
                host = self._in.host_rows(*rows.shape)
                for row, buffer in zip(host.numpy(), buffers, strict=True):
                    row[:] = buffer
                rows.copy_(host, non_blocking=True)
            ids = self._ids(block_ids)
            for words in self._parts[group_idx]:
                words.view.index_copy_(0, ids[words.member], words.of_rows(rows))
            if pinned is None:
                self._in.settle()  # The host staging is needed for the next batch.

    def settle(self) -> None:
        self._in.settle()
        while self._borrowed:
            self._borrowed.pop().give_back()

    def _ids(self, block_ids: BlockIds) -> torch.Tensor:
        """int64 [members, blocks], on the device."""
        return torch.from_numpy(np.asarray(block_ids, np.int64)).to(self._device)

    def _borrow(self, buffers: Buffers) -> PinnedMemory | None:
        """The pinned memory all buffers lie in, kept until it is given back; None if they do not."""
        pinned = self._pinned
        return pinned if pinned is not None and pinned.borrow(buffers) else None


@dataclass(frozen=True, slots=True)
class _Words:
    """A part of a layout in the widest words that fit: indexing kernels work element by element.

    Args:
        view: [B, S, L, H / S, r, N / r, C words] of the engine's memory.
        start, stop: of the part's words in each chunk.
    """

    view: torch.Tensor
    member: int
    start: int
    stop: int
    num_shards: int

    @classmethod
    def of(cls, layout: Layout, part: Part) -> _Words:
        view = part.view
        fits = all(
            number % 8 == 0
            for number in (layout.chunk_bytes, part.start, view.shape[-1], view.data_ptr(), *view.stride()[:-1])
        )
        size = 8 if fits else 1
        stop = part.start + part.chunk_bytes
        words = view.view(torch.int64) if fits else view
        return cls(words, part.member, part.start // size, stop // size, layout.num_shards)

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The same words of staged blocks, uint8 [count, region bytes] -> [count, S, L, ...]."""
        chunks = rows.view(self.view.dtype).unflatten(1, (self.num_shards, -1))
        return chunks[:, :, self.start : self.stop].unflatten(2, self.view.shape[2:])


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

    def borrow(self, buffers: Buffers) -> bool:
        """Whether all buffers can be copied to and from directly; if so, until `give_back`."""
        with self._lock:
            if self._closing or not all(self._covers(buffer) for buffer in buffers):
                return False
            self._users += 1
            return True

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            self._unregister_if_unused()

    def close(self) -> None:
        """No more is registered or borrowed; the last user gives the memory back to the system."""
        with self._lock:
            self._closing = True
            self._unregister_if_unused()

    def _covers(self, buffer: npt.NDArray[np.uint8]) -> bool:
        # CUDA copies from and to one registration at a time.
        first = buffer.ctypes.data - self._start
        last = first + buffer.nbytes - 1
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
    """One direction: a stream, and device and pinned memory for one batch."""

    def __init__(self, device: torch.device, nbytes: int):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._staged = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._host: torch.Tensor | None = None

    def after(self, mark: torch.cuda.Event) -> torch.cuda.StreamContext:
        torch.cuda.set_device(self._device)  # Threads start on device 0.
        self._stream.wait_event(mark)
        return torch.cuda.stream(self._stream)

    def device_rows(self, count: int, nbytes: int) -> torch.Tensor:
        """Device memory [count, nbytes]; what it held before is overwritten."""
        assert count * nbytes <= self._staged.numel(), f"a batch of {count} blocks with {nbytes} bytes is too large"
        return self._staged[: count * nbytes].view(count, nbytes)

    def host_rows(self, count: int, nbytes: int) -> torch.Tensor:
        """Pinned memory [count, nbytes]."""
        if self._host is None:
            self._host = torch.empty(self._staged.shape, dtype=torch.uint8, pin_memory=True)
        return self._host[: count * nbytes].view(count, nbytes)

    def settle(self) -> None:
        self._stream.synchronize()
