"""A clock that advances only when the test says so."""

from __future__ import annotations


class FakeClock:
    """Monotonic seconds."""

    def __init__(self, now: float = 1_000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds
