"""A stand-in for a GPU with a thread of its own: executes forward passes in order, 0.2 s late or when told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.support.toy.engine import ToyEngine
from vllm_plugin.worker.copy import CpuCopier


class SlowDevice:
    """Runs the forward passes of a toy engine.

    Attributes:
        go: while it is not set, nothing is done.
    """

    LATE_S = 0.2

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self._executor = ThreadPoolExecutor(1)
        self._last: Future[None] = self._executor.submit(lambda: None)

    def launch(self, work: Callable[..., object], *args: Any) -> None:
        def run_late() -> None:
            self.go.wait()
            time.sleep(self.LATE_S)
            work(*args)

        self._last = self._executor.submit(run_late)

    def attach(self, engine: ToyEngine) -> None:
        """Forward passes of a toy engine of one rank run on this device from now on."""
        (rank,) = engine.ranks
        write, wrong = rank.cache.write, rank.cache.wrong

        def look_when_done(tables: Any, hashes: Any, start: int) -> Any:
            if start:
                self._last.result()
            return wrong(tables, hashes, start)

        rank.cache.write = lambda *args: self.launch(write, *args)  # type: ignore[method-assign]
        rank.cache.wrong = look_when_done  # type: ignore[method-assign]

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Copies of every engine begin when what this device had been given by their mark is done."""
        gather, scatter = CpuCopier.gather, CpuCopier.scatter

        def gather_after(copier: CpuCopier, mark: Future[None], *args: Any) -> None:
            mark.result()
            gather(copier, None, *args)

        def scatter_after(copier: CpuCopier, mark: Future[None], *args: Any) -> None:
            mark.result()
            scatter(copier, None, *args)

        with (
            patch.object(CpuCopier, "mark", lambda _: self._last),
            patch.object(CpuCopier, "gather", gather_after),
            patch.object(CpuCopier, "scatter", scatter_after),
        ):
            try:
                yield
            finally:
                self.go.set()


@contextmanager
def unmarked() -> Iterator[None]:
    """Copies wait for nothing."""
    reached: Future[None] = Future()
    reached.set_result(None)
    with patch.object(CpuCopier, "mark", lambda _: reached):
        yield
