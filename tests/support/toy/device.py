"""A stand-in for a GPU: executes work in the order of its launches, and later than it was launched."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

Work = Callable[[], None]
PATIENCE_S = 30.0


class Device:
    """Runs on the engine's thread: at launch or, where the device is `late`, at `catch_up`.

    Other threads only wait for marks.
    """

    def __init__(self, late: bool):
        self._late = late
        self._launched: deque[Work] = deque()
        self._num_done = 0
        self._changed = threading.Condition()

    def launch(self, work: Work) -> None:
        self._launched.append(work)
        if not self._late:
            self.catch_up()

    def mark(self) -> int:
        """A mark that is reached when all work launched so far is done."""
        return self._num_done + len(self._launched)

    def has_reached(self, mark: int) -> bool:
        return self._num_done >= mark

    def catch_up(self, mark: int | None = None) -> None:
        """Executes the work launched before a mark; all work by default."""
        until = self.mark() if mark is None else mark
        while self._num_done < until:
            work = self._launched.popleft()
            try:
                work()
            finally:
                with self._changed:
                    self._num_done += 1
                    self._changed.notify_all()

    def wait(self, mark: int) -> None:
        """Blocks until a mark is reached."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.has_reached(mark), PATIENCE_S), "the device does not go on"


class DeviceCopier:
    """Copies that begin when the device has done what it had been given by their mark, as on a GPU's stream.

    Attributes:
        inner: the copier that does it.
    """

    def __init__(self, device: Device, inner: Any):
        self._device = device
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def mark(self) -> int:
        return self._device.mark()

    def gather(self, mark: int, group_idx: int, block_ids: Sequence[Sequence[int]], buffers: Any) -> None:
        self._device.wait(mark)
        self.inner.gather(None, group_idx, block_ids, buffers)

    def scatter(self, mark: int, group_idx: int, block_ids: Sequence[Sequence[int]], buffers: Any) -> None:
        self._device.wait(mark)
        self.inner.scatter(None, group_idx, block_ids, buffers)
