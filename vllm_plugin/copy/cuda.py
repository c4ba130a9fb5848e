"""Copies on a GPU: blocks are gathered or scattered on the device, and cross the bus straight from or to the pool.

Shared memory is registered with CUDA (pinned) in the background; until it is, and for buffers that lie elsewhere, bytes
take one step more, through pinned staging. Each direction has a stream and staging of its own, so that neither waits
for the other nor for the model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from kvpool.transport.base import Buffers

logger = init_logger("vllm.kvpool.copy")

STAGING_BYTES = 32 << 20
REGISTER_STEP_BYTES = 1 << 30


class CudaCopier:
    """See `Copier`.

    Args:
        views: as `canonical_view` makes them.
    """

    batch_bytes = STAGING_BYTES

    def __init__(self, views: list[torch.Tensor]):
        # Eight bytes at a time where that is possible: indexing kernels work element by element.
        self._views = [view.view(torch.int64) if view.shape[-1] % 8 == 0 else view for view in views]
        self._num_layers = sum(view.shape[2] for view in views)
        device, block_bytes = views[0].device, sum(view[0].numel() for view in views)
        self._device = device
        self._out = _Lane(device, block_bytes)
        self._in = _Lane(device, block_bytes)
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

    def gather(self, mark: torch.cuda.Event, block_ids: Sequence[int], buffers: Buffers) -> None:
        with self._out.after(mark):
            device, ids = self._out.stage(block_ids)
            for view, part in self._parts(device, len(ids)):
                part.copy_(view.index_select(0, ids))
            pinned = self._borrow(buffers)
            if pinned is not None:
                for row, buffer in zip(device, buffers, strict=True):
                    torch.from_numpy(buffer).copy_(row, non_blocking=True)
                self._out.settle()
                pinned.give_back()
                return
            host = self._out.host(len(ids))
            host.copy_(device, non_blocking=True)
            self._out.settle()
        for row, buffer in zip(host.numpy(), buffers, strict=True):
            buffer[:] = row

    def scatter(self, mark: torch.cuda.Event, block_ids: Sequence[int], buffers: Buffers) -> None:
        with self._in.after(mark):
            device, ids = self._in.stage(block_ids)
            pinned = self._borrow(buffers)
            if pinned is not None:
                self._borrowed.append(pinned)
                for row, buffer in zip(device, buffers, strict=True):
                    row.copy_(torch.from_numpy(buffer), non_blocking=True)
            else:
                host = self._in.host(len(ids))
                for row, buffer in zip(host.numpy(), buffers, strict=True):
                    row[:] = buffer
                device.copy_(host, non_blocking=True)
            for view, part in self._parts(device, len(ids)):
                view.index_copy_(0, ids, part)
            if pinned is None:
                self._in.settle()  # The host staging is needed for the next batch.

    def settle(self) -> None:
        self._in.settle()
        while self._borrowed:
            self._borrowed.pop().give_back()

    def _borrow(self, buffers: Buffers) -> PinnedMemory | None:
        """The pinned memory all buffers lie in, kept until it is given back; None if they do not."""
        pinned = self._pinned
        return pinned if pinned is not None and pinned.borrow(buffers) else None

    def _parts(self, staged: torch.Tensor, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs: a view [B, S, l, ...] and its part of the staged blocks [count, S, l, ...]."""
        first = self._views[0]
        whole = staged.view(first.dtype).view(count, first.shape[1], self._num_layers, *first.shape[3:])
        layer = 0
        for view in self._views:
            yield view, whole[:, :, layer : layer + view.shape[2]]
            layer += view.shape[2]


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

    def __init__(self, device: torch.device, block_bytes: int):
        self._device = device
        self._blocks = max(1, STAGING_BYTES // block_bytes)
        self._stream = torch.cuda.Stream(device)
        self._staged = torch.empty((self._blocks, block_bytes), dtype=torch.uint8, device=device)
        self._host: torch.Tensor | None = None

    def after(self, mark: torch.cuda.Event) -> torch.cuda.StreamContext:
        torch.cuda.set_device(self._device)  # Threads start on device 0.
        self._stream.wait_event(mark)
        return torch.cuda.stream(self._stream)

    def stage(self, block_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Device memory [count, block bytes], and the block ids on the device; what it held before is overwritten."""
        count = len(block_ids)
        assert count <= self._blocks, f"{count} blocks in a batch of at most {self._blocks}"
        ids = torch.from_numpy(np.asarray(block_ids, np.int64)).to(self._device)
        return self._staged[:count], ids

    def host(self, count: int) -> torch.Tensor:
        """Pinned memory [count, block bytes]."""
        if self._host is None:
            self._host = torch.empty(self._staged.shape, dtype=torch.uint8, pin_memory=True)
        return self._host[:count]

    def settle(self) -> None:
        self._stream.synchronize()
