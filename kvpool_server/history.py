"""The server's own memory of its numbers, for the dashboard: a sample every 10 s, in rings of fixed size.

Samples are numbers as they are, counters since the server's start among them; readers make rates. A history begins
with its server, so a restart is a gap and never a negative rate. Belongs to the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.errors import InvalidRequestError

INTERVAL_S = 10
"""Between two samples."""
MAX_SERIES = 160
"""Series that a history keeps; it ignores further ones."""
MAX_POINTS = 400
"""Samples of one answer."""
MAX_BYTES = 4 << 20
"""Of all samples, when a history is full; `MAX_SERIES` sees to it."""
_FINE, _COARSE = 1, 60
"""Every how many samples one is kept, by ring."""
_ROWS = {_FINE: 2_160, _COARSE: 1_008}
"""Samples that a ring keeps: 6 h and 7 days."""
_COLUMNS = 32
"""Series for which a ring gets memory at once."""

SPANS = {"15m": (_FINE, 1), "1h": (_FINE, 1), "6h": (_FINE, 6), "24h": (_COARSE, 1), "7d": (_COARSE, 3)}
"""By span: the ring, and every how many of its samples an answer has one."""
_SECONDS = {"15m": 900, "1h": 3_600, "6h": 6 * 3_600, "24h": 24 * 3_600, "7d": 7 * 24 * 3_600}

Key = tuple[str, ...]
"""The name of a series, and what it is of: ("tier", "file:/mnt/kv", "up")."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a history, at most `MAX_POINTS` samples.

    Args:
        boot: of the server; counters of different boots have nothing in common.
        interval_s: between two samples.
        times: seconds since 1970, ascending, float64 [samples].
        values: by series, float64 [samples]; NaN where a sample lacks the series.
    """

    boot: str
    interval_s: int
    times: npt.NDArray[np.float64]
    values: Mapping[Key, npt.NDArray[np.float64]]


class _Ring:
    """The last samples, one of every `every`: a row each, with a column for each series."""

    def __init__(self, every: int):
        self.every = every
        self._num_rows = _ROWS[every]
        self._times = np.zeros(self._num_rows)
        self._values = np.full((self._num_rows, 0), np.nan)
        self._count = 0

    @property
    def nbytes(self) -> int:
        return self._times.nbytes + self._values.nbytes

    def add(self, at: float, values: Mapping[int, float]) -> None:
        """Adds a row, in the place of the oldest one if the ring is full."""
        lacking = max(values, default=-1) + 1 - self._values.shape[1]
        if lacking > 0:
            more = -(-lacking // _COLUMNS) * _COLUMNS
            self._values = np.hstack([self._values, np.full((self._num_rows, more), np.nan)])
        row = self._count % self._num_rows
        self._times[row] = at
        self._values[row] = np.nan
        self._values[row, list(values)] = list(values.values())
        self._count += 1

    def rows(self, after: float, stride: int) -> npt.NDArray[np.intp]:
        """The rows after a time, oldest first: those whose number in the history is a multiple of `stride`."""
        first = max(0, self._count - self._num_rows)
        numbers = np.arange(first + -first % stride, self._count, stride)
        rows: npt.NDArray[np.intp] = numbers % self._num_rows
        return rows[self._times[rows] > after]

    def take(self, rows: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Times and values of some rows."""
        return self._times[rows], self._values[rows]


class History:
    """See the module.

    Args:
        clock: monotonic seconds.
        now: seconds since 1970, asked once: times of samples ascend, whatever happens to the host's clock.
        boot: names this start of the server.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time, boot: str = ""
    ):
        self.boot = boot
        self._clock = clock
        self._offset = now() - clock()
        self._columns: dict[Key, int] = {}
        self._rings = {every: _Ring(every) for every in _ROWS}
        self._count = 0

    @property
    def nbytes(self) -> int:
        """Memory of the rings."""
        return sum(ring.nbytes for ring in self._rings.values())

    def time(self) -> float:
        """Now, as samples have it."""
        return self._clock() + self._offset

    def record(self, values: Mapping[Key, float]) -> None:
        """Adds a sample. Series beyond the first `MAX_SERIES` are left out."""
        columns = self._columns
        for key in values:
            if key not in columns and len(columns) < MAX_SERIES:
                columns[key] = len(columns)
        row, at = {columns[key]: value for key, value in values.items() if key in columns}, self.time()
        for ring in self._rings.values():
            if self._count % ring.every == 0:
                ring.add(at, row)
        self._count += 1

    def part(self, span: str, since: float = 0.0) -> Part:
        """The samples of a span that are later than `since`. Raises InvalidRequestError for an unknown span."""
        if span not in SPANS:
            raise InvalidRequestError(f"span {span[:20]!r} is unknown; give {', '.join(SPANS)}")
        every, stride = SPANS[span]
        ring = self._rings[every]
        rows = ring.rows(max(since, self.time() - _SECONDS[span]), stride)[-MAX_POINTS:]
        times, values = ring.take(rows)
        columns = {key: values[:, column] for key, column in self._columns.items() if column < values.shape[1]}
        return Part(self.boot, INTERVAL_S * every * stride, times, columns)

    def grown(self, key: Key, seconds: float, value: float) -> float:
        """By how much a counter that is now `value` has grown within the last seconds; since the start at most."""
        ring = self._rings[_FINE]
        column = self._columns.get(key)
        if column is None:
            return value
        rows = ring.rows(self.time() - seconds - INTERVAL_S, 1)
        if not len(rows):
            return 0.0
        before = ring.take(rows[:1])[1][0, column]
        return value if np.isnan(before) else max(0.0, value - float(before))
