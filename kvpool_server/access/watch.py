"""Has a running server act on new files, and on credentials that end or are revoked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import Any

import structlog

from kvpool.security.watched_files import WatchedFiles
from kvpool_server.access.running_calls import RunningCalls

log = structlog.get_logger()

LOOK_S = 1.0
"""How often calls are compared with the credentials in force."""


class AccessWatch:
    """Reads changed files, and ends the calls and holds of callers that they refuse.

    Args:
        files: of credentials and limits; each looks at its own interval.
        calls: those under way.
        expire_owned: ends the leases and tickets of some principals.
    """

    def __init__(
        self,
        files: Sequence[WatchedFiles[Any]],
        calls: RunningCalls,
        expire_owned: Callable[[Set[str]], Awaitable[None]],
    ):
        self._files = files
        self._calls = calls
        self._expire_owned = expire_owned
        self._woken = asyncio.Event()

    def look_at_once(self) -> None:
        """Reads changed files now. For signal handlers."""
        self._woken.set()

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._woken.wait()
            except TimeoutError:
                pass
            at_once = self._woken.is_set()
            self._woken.clear()
            try:
                await asyncio.to_thread(self._look, at_once)
                if taken := self._calls.end_refused():
                    log.warning(
                        "ended calls, leases and tickets of callers that are refused now", principals=sorted(taken)
                    )
                    await self._expire_owned(taken)
            except Exception:
                log.exception("reading credentials failed; the server tries again", next_in_s=LOOK_S)

    def _look(self, at_once: bool) -> None:
        for files in self._files:
            files.look(at_once=at_once)
