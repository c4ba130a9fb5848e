"""The calls under way by credential; those of credentials that end or are revoked are ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import suppress
from typing import Any

import structlog

from kvpool.protocol.errors import UnauthenticatedError
from kvpool.security.files import WatchedFiles
from kvpool_server.access.authentication import Credential

log = structlog.get_logger()

LOOK_S = 1.0
"""How often calls are compared with the credentials in force."""
MAX_CALLERS = 4_096
"""Credentials that are remembered after their last call; beyond it, the one that came first is forgotten."""


class RunningCalls:
    """The calls of one server. Owned by its event loop.

    Args:
        check: raises UnauthenticatedError if a credential is not in force any more.
        hold_s: longest time that a caller may hold leases and tickets after its last call.
    """

    def __init__(
        self, check: Callable[[Credential], Credential], hold_s: float, clock: Callable[[], float] = time.monotonic
    ):
        self._check = check
        self._hold_s = hold_s
        self._clock = clock
        self._calls: dict[asyncio.Task[object], Credential] = {}
        self._ended: dict[asyncio.Task[object], UnauthenticatedError] = {}
        self._callers: dict[str, tuple[Credential, float]] = {}  # By digest -> when the last call began or ended.

    def call(self, credential: Credential) -> _Call:
        """Surrounds the call that the current task serves, which `end_refused` ends with an UnauthenticatedError."""
        return _Call(self, credential)

    def end_refused(self) -> set[str]:
        """Ends the calls whose credentials are not in force any more.

        Returns:
            The principals of credentials that were revoked before their end, and that may have left leases and
            tickets. Those of a credential that has ended by itself are left to their deadlines: its principal goes on
            with a new one.
        """
        refused: dict[str, UnauthenticatedError] = {}
        now = self._clock()
        callers = {digest: credential for digest, (credential, _) in self._callers.items()}
        for digest, credential in (callers | {each.digest: each for each in self._calls.values()}).items():
            try:
                self._check(credential)
            except UnauthenticatedError as error:
                refused[digest] = error
        for task, credential in self._calls.items():
            refusal = refused.get(credential.digest)
            if refusal is not None and task not in self._ended:
                self._ended[task] = refusal
                task.cancel()
        taken = {
            str(credential.principal)
            for digest, credential in callers.items()
            if digest in refused and not credential.has_ended
        }
        running = {credential.digest for credential in self._calls.values()}
        self._callers = {
            digest: caller
            for digest, caller in self._callers.items()
            if digest not in refused and (digest in running or now - caller[1] <= self._hold_s)
        }
        return taken

    def _remember(self, credential: Credential) -> None:
        if credential.digest not in self._callers and len(self._callers) >= MAX_CALLERS:
            del self._callers[next(iter(self._callers))]
        self._callers[credential.digest] = credential, self._clock()


class _Call:
    """The context manager of `RunningCalls.call`: a class, because a generator would take four times as long."""

    __slots__ = ("_calls", "_credential", "_task")

    def __init__(self, calls: RunningCalls, credential: Credential):
        self._calls, self._credential = calls, credential

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._calls._calls[task] = self._credential
        self._calls._remember(self._credential)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        del self._calls._calls[self._task]
        refusal = self._calls._ended.pop(self._task, None)
        if refusal is None:
            self._calls._remember(self._credential)
        elif isinstance(error, asyncio.CancelledError):
            self._task.uncancel()
            raise refusal from None


async def watch_access(
    files: Sequence[WatchedFiles[Any]],
    calls: RunningCalls,
    expire_owned: Callable[[Set[str]], Awaitable[None]],
    woken: asyncio.Event,
) -> None:
    """Reads changed files, and ends the calls and holds of callers that they refuse, until cancelled.

    Args:
        files: of credentials and limits; each looks at its own interval.
        expire_owned: ends the leases and tickets of some principals.
        woken: set to have changed files read at once.
    """

    def look(at_once: bool) -> None:
        for each in files:
            each.look(at_once=at_once)

    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await woken.wait()
        at_once = woken.is_set()
        woken.clear()
        try:
            await asyncio.to_thread(look, at_once)
            if taken := calls.end_refused():
                log.warning("ended calls, leases and tickets of callers that are refused now", principals=sorted(taken))
                await expire_owned(taken)
        except Exception:
            log.exception("reading credentials failed; the server tries again", next_in_s=LOOK_S)
