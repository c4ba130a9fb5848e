"""Work in steps, so that no call on many entries holds up the event loop.

A generator does the work and yields between two steps; its value is the result. Whoever runs it may let other calls use
the pool between two steps: the pool is consistent there.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

STEP_BLOCKS = 128
"""Blocks of one step that inserts or drops entries: less than 1 ms."""
LOOKUP_STEP_BLOCKS = 4_096
"""Blocks of one step that finds entries: about 1 ms."""
SETTLED_PER_CALL = 256
"""Entries whose lease, ticket or quarantine has ended that each call of the pool takes care of; later calls follow."""

Value = TypeVar("Value")
Steps = Generator[None, None, Value]


def finish(steps: Steps[Value]) -> Value:
    """Does all steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
