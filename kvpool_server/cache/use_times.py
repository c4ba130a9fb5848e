"""When a stamp was given: entries record their last use as a stamp (`eviction/base.py`), people ask for seconds.

A mark is a stamp and the time at which it was the latest one. Level k keeps the last `MARKS_PER_LEVEL` marks that are
2**k seconds or more apart, so that the error is about 3 % of a use's age, and 1 s at least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool_server.cache.eviction.base import TICK

MARKS_PER_LEVEL = 64
NUM_LEVELS = 22
"""The last level reaches back 8 years."""
UNKNOWN = -1.0


class UseTimes:
    """Those of one pool. Not thread-safe: the pool's event loop owns it.

    Attributes:
        next_mark: the time from which on `mark` is worth a call.
    """

    def __init__(self, now: float):
        self.next_mark = now
        self._levels: list[deque[tuple[float, int]]] = [deque(maxlen=MARKS_PER_LEVEL) for _ in range(NUM_LEVELS)]
        self._marks: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]] | None = None  # Made once after a mark.

    def mark(self, now: float, stamp: int) -> None:
        """No later stamp has been given before `now`. Call it before a call's stamp is given, from `next_mark` on."""
        self.next_mark = now + 1
        self._marks = None
        stamp |= TICK - 1  # Whatever the kinds of its uses.
        for level, marks in enumerate(self._levels):
            if marks and marks[-1][1] == stamp:
                marks[-1] = now, stamp  # The pool was idle: what it uses from now on is not older than this.
            elif not marks or now - marks[-1][0] >= 1 << level:
                marks.append((now, stamp))
            else:
                break

    def ages(self, stamps: Sequence[int], now: float) -> npt.NDArray[np.float64]:
        """Seconds since each stamp was given; `UNKNOWN` for a stamp older than all marks."""
        if self._marks is None:
            self._marks = self._ascending()
        times, marked = self._marks
        found = np.searchsorted(marked, np.asarray(stamps, np.int64)) - 1
        ages = np.full(len(stamps), UNKNOWN)
        known = found >= 0
        ages[known] = np.maximum(now - times[found[known]], 0.0)
        return ages

    def _ascending(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Times and stamps of all marks, ascending: those of a level that are older than the finer levels' ones."""
        latest_first: list[tuple[float, int]] = []
        for marks in self._levels:
            latest_first += [mark for mark in reversed(marks) if not latest_first or mark[1] < latest_first[-1][1]]
        times, stamps = [time for time, _ in reversed(latest_first)], [stamp for _, stamp in reversed(latest_first)]
        return np.array(times, np.float64), np.array(stamps, np.int64)
