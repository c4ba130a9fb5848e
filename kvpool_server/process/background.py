"""Work beside a server's calls, which ends when the server closes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any


def in_background(stack: AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
    """Starts work, which the stack cancels and awaits."""
    task = asyncio.create_task(work)

    async def end() -> None:
        task.cancel()
        await asyncio.wait((task,))

    stack.push_async_callback(end)
