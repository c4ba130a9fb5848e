"""Work in steps, so that no call on many entries holds up the event loop.

A generator does the work and yields between two steps; its value is the result. Whoever runs it may let other calls use
the pool between two steps: the pool is consistent there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Protocol, TypeVar

STEP_BLOCKS = 128
"""Blocks of one step that inserts or drops entries: less than 1 ms."""
LOOKUP_STEP_BLOCKS = 2_048
"""Blocks of one step that finds entries: about 0.5 ms, and 4 ms among ten million entries where memory is slow."""
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


class Run(Protocol):
    """Does work in steps, and may let other calls use the pool between two steps."""

    def __call__(self, steps: Steps[Value]) -> Awaitable[Value]:
        """The result of the work; raises what it raises."""


async def at_once(steps: Steps[Value]) -> Value:
    """The `Run` that lets no other call in between."""
    return finish(steps)
