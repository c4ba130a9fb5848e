"""How much CPU time a part of a test takes."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

MAX_CPU_S = 2.0
"""Of one input or call, on a busy machine. The reply that an audit found took 5 s."""


class LongestPart:
    """The most CPU time of this process that one part took.

    No garbage is collected meanwhile: a full collection looks at what all tests before have left, a second's work.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def part(self) -> Iterator[None]:
        gc.disable()
        began_s = time.process_time()
        try:
            yield
        finally:
            self.seconds = max(self.seconds, time.process_time() - began_s)
            gc.enable()

    def __str__(self) -> str:
        return f"{self.seconds * 1000:.1f} ms of CPU time"
