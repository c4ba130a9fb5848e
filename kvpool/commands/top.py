"""`kvpool top`: draws what a pool does now until its user presses q, whatever becomes of the server."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Annotated

import typer
from rich.live import Live

from kvpool.client.client import Client
from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import Endpoint, within
from kvpool.commands.top_frame import Interval, View, frame
from kvpool.doctor.judgements import RECENT_S, Window, window_of
from kvpool.protocol.errors import InvalidRequestError, KVPoolError, UnavailableError
from kvpool.report.output import console
from kvpool.v1 import pool_pb2 as pb

EARLIER_EVERY_S = 10.0
QUIT = b"qQ\x03\x04"
"""Keys that end it: q, Ctrl-C, Ctrl-D."""
_SEQUENCES = re.compile(rb"\x1b(O|\[[0-?]*)?.")
"""What a terminal sends for other keys, such as arrows; F2 has a Q."""


def top(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    interval: Annotated[
        float, typer.Option(callback=within(0.1, 3_600), help="Seconds between two frames, over which rates are taken.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, with the rates of one interval, and end.")
    ] = False,
) -> None:
    """Show what the pool does now: hits, rates, latencies, memory, tiers, and who uses it. The key q ends it."""
    with suppress(KeyboardInterrupt), closing(Watch(endpoint, lambda: common.client_of(endpoint))) as watch:
        if once:
            watch.look()
            time.sleep(interval)
            view = watch.look()
            if view.trouble:
                raise UnavailableError(view.trouble)
            console().print(frame(view))
        elif not sys.stdout.isatty():
            raise InvalidRequestError("kvpool top draws on a terminal; give --once to print one frame")
        else:
            with _single_keys(), Live(frame(watch.look()), console=console(), screen=True, auto_refresh=False) as live:
                while not _quits(interval):
                    live.update(frame(watch.look()), refresh=True)


class Watch:
    """Asks one server again and again. A server that is away is asked with a new connection, which may fail.

    Raises ConfigError if no connection can be made with the command's options.
    """

    def __init__(self, endpoint: str, connect: Callable[[], Client]):
        self._connect = connect
        self._client: Client | None = connect()
        self._last: tuple[pb.StatsResponse, float] | None = None
        self._earlier: deque[tuple[pb.StatsResponse, float]] = deque()
        """Snapshots of one run of the server, `EARLIER_EVERY_S` apart, the oldest about `RECENT_S` old."""
        self._view = View(endpoint)

    def look(self) -> View:
        """Asks the server once. Never raises for a server that is away."""
        try:
            if self._client is None:
                self._client = self._connect()
            stats = self._client.admin.stats()
        except KVPoolError as error:
            self.close()
            silent_s = time.monotonic() - self._last[1] if self._last is not None else 0.0
            self._view = replace(self._view, trouble=str(error), silent_s=silent_s)
            return self._view
        now = time.monotonic()
        before, asked_at = self._last or (stats, now)
        self._last = stats, now
        interval = Interval.of(before, stats, now - asked_at)
        self._view = View(self._view.endpoint, interval, self._window(stats, now))
        return self._view

    def _window(self, stats: pb.StatsResponse, now: float) -> Window | None:
        """The last ten minutes, as far as this object knows them."""
        earlier = self._earlier
        if earlier and earlier[0][0].boot_token != stats.boot_token:
            earlier.clear()
        if not earlier or now - earlier[-1][1] >= EARLIER_EVERY_S:
            earlier.append((stats, now))
        while len(earlier) > 1 and now - earlier[1][1] >= RECENT_S:
            earlier.popleft()
        before, at = earlier[0]
        return window_of(stats, before, now - at)

    def close(self) -> None:
        """Closes the connection; the next look makes another one."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


@contextmanager
def _single_keys() -> Iterator[None]:
    """Has keys arrive when they are pressed, without an echo, where standard input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quits(timeout_s: float) -> bool:
    """Waits for `timeout_s`; True at once if a key that ends the command is pressed, or standard input has ended."""
    if not sys.stdin.isatty():
        time.sleep(timeout_s)
        return False
    ends_at = time.monotonic() + timeout_s
    while (left_s := ends_at - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0]:
            # `sys.stdin` would read ahead, and `select` does not see what its buffer holds.
            typed = os.read(sys.stdin.fileno(), 1024) or b"q"
            if any(key in QUIT for key in _SEQUENCES.sub(b"", typed)):
                return True
    return False
