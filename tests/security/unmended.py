"""A server's command without one of the mechanisms that keep its callers apart: the variable UNMENDED names it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Mapping
from typing import Any

from kvpool_server.app import command as cli
from kvpool_server.cache.steps import Steps, finish
from kvpool_server.rpc import chunks, handlers
from kvpool_server.rpc.turns import Turns


def _without_turns() -> None:
    async def run(_: Turns, steps: Steps[Any]) -> Any:
        return finish(steps)

    async def wait(_: Turns) -> None:
        return

    Turns.run, Turns.wait = run, wait  # type: ignore[method-assign]


def _one_event_a_pass() -> None:
    cli.EventLoop = asyncio.SelectorEventLoop  # type: ignore[misc]


def _uncounted() -> None:
    def count(_: bytes) -> Generator[None, None, int]:
        return 0
        yield

    handlers._num_fields = count


def _verified_in_threads() -> None:
    chunks.MAX_LOCKED_BYTES = 0


MECHANISMS: Mapping[str, Callable[[], None]] = {
    "turns": _without_turns,
    "events handled together": _one_event_a_pass,
    "counted fields": _uncounted,
    "verifications in steps": _verified_in_threads,
}

if __name__ == "__main__":
    MECHANISMS[os.environ["UNMENDED"]]()
    cli.main()
