"""`kvpool top`: draws what a pool does now until its user presses q, whatever becomes of the server.

Models, tenants, engines and tiers are named by others: each name is made printable, and none is read as markup.
"""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from kvpool.client.client import Client
from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import Endpoint, within
from kvpool.protocol.errors import InvalidRequestError, KVPoolError, UnavailableError
from kvpool.protocol.reports import rpc_quantile, since
from kvpool.protocol.text import duration_text, printable, size_text
from kvpool.report.judgements import RECENT_S, UNKNOWN, Level, Window, judgements, problems, tokens, window_of
from kvpool.report.output import MARKS, bar, console, count_text, rate_text, seconds_text, share_text
from kvpool.v1 import pool_pb2 as pb

_T = TypeVar("_T")
BAR_CHARS = 30
MAX_PROBLEMS = 4
MAX_ROWS = 12
"""Most rows of each table."""
LABEL_CHARS = 11
_STYLES = {Level.ERROR: "bold red", Level.WARNING: "yellow", Level.INFO: "", Level.OK: ""}
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


@dataclass(frozen=True, slots=True)
class Interval:
    """Two snapshots of one pool, `seconds` apart. No rate is negative.

    After a restart of the server its counts begin anew: `of` then takes the time from the server's start instead.
    """

    before: pb.StatsResponse
    now: pb.StatsResponse
    seconds: float
    restarted: bool = False

    @classmethod
    def of(cls, before: pb.StatsResponse, now: pb.StatsResponse, seconds: float) -> Interval:
        """The interval that ends with `now`, of `seconds` by the caller's clock."""
        restarted = before.boot_token != now.boot_token
        if restarted:
            before = pb.StatsResponse()
            seconds = min(seconds, now.server.uptime_seconds)
        return cls(before, now, max(seconds, 1e-3), restarted)

    def count(self, name: str) -> int:
        """How much a counter of the pool grew."""
        return max(0, self.now.counters.get(name, 0) - self.before.counters.get(name, 0))

    def per_second(self, count: float) -> float:
        return count / self.seconds

    @property
    def server(self) -> pb.ServerStats:
        """The server's RPCs, transfers and usage within the interval; all else is as now."""
        return since(self.now.server, self.before.server)


@dataclass(frozen=True, slots=True)
class View:
    """What a frame shows.

    Args:
        interval: None until the server has answered.
        window: the time within which a counter that grew is a problem.
        trouble: why the server's last answer is missing; empty if it is not.
        silent_s: seconds since the last answer, if there is `trouble`.
    """

    endpoint: str
    interval: Interval | None = None
    window: Window = UNKNOWN
    trouble: str = ""
    silent_s: float = 0.0


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

    def _window(self, stats: pb.StatsResponse, now: float) -> Window:
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


def frame(view: View) -> RenderableType:
    """One frame, of any width from 80 columns."""
    interval = view.interval
    if interval is None:
        waiting = view.trouble or f"waiting for kvpool-server at {view.endpoint}"
        return Text(printable(waiting), style=_STYLES[Level.ERROR] if view.trouble else "")
    parts: list[RenderableType] = [Text(printable(heading(view.endpoint, interval.now)), style="bold")]
    if view.trouble:
        text = f"away for {duration_text(view.silent_s)}: {view.trouble}; these are its last numbers"
        parts.append(Text(printable(text), style=_STYLES[Level.ERROR]))
    if interval.restarted:
        parts.append(Text("the server has restarted: counts are those since its start", style=_STYLES[Level.WARNING]))
    found = problems(judgements(interval.now, view.window))
    for each in found[:MAX_PROBLEMS]:
        parts.append(Text(printable(f"{MARKS[each.level]}{each.check}: {each.text}"), style=_STYLES[each.level]))
    if len(found) > MAX_PROBLEMS:
        parts.append(Text(f"{'':8}and {len(found) - MAX_PROBLEMS} more: see `kvpool stats`"))
    parts += [Text(f"{label:<{LABEL_CHARS}}{printable(text)}") for label, text in _lines(interval)]
    return Group(*parts, *_usage_table(interval), *_engine_table(interval.now))


def heading(endpoint: str, stats: pb.StatsResponse) -> str:
    """The server's release, endpoint and age."""
    uptime = duration_text(stats.server.uptime_seconds)
    return f"kvpool-server {stats.server.version} at {endpoint}, up for {uptime}"


def lookup_latency(server: pb.ServerStats) -> str:
    """Median and 99th percentile of the time that lookups took, without those that waited for a tier."""
    p50, p99 = (seconds_text(rpc_quantile(server, "Lookup", share)) for share in (0.5, 0.99))
    return f"p50 {p50}, p99 {p99}"


def loop_lag(server: pb.ServerStats) -> str:
    """How late the server's event loop was."""
    lag = seconds_text(server.loop_lag_p50_seconds), seconds_text(server.loop_lag_max_seconds)
    return f"p50 {lag[0]}, max {lag[1]} in the last minute"


def moved_bytes(server: pb.ServerStats) -> dict[str, dict[str, int]]:
    """Bytes that engines could load and have stored, by any transport; then those that passed through the server."""
    usage = server.usage
    could_load, stored = sum(each.loaded_bytes for each in usage), sum(each.stored_bytes for each in usage)
    moved = {"engines": {"could load": could_load, "stored": stored}}
    for each in server.transfers:
        moved.setdefault(each.transport, {})[each.direction] = each.nbytes
    return moved


def _lines(interval: Interval) -> Iterator[tuple[str, str]]:
    now = interval.now
    used = now.arena_bytes - now.free_bytes
    share = used / now.arena_bytes if now.arena_bytes else 0.0
    yield "memory", f"{bar(share, BAR_CHARS)} {size_text(used)} of {size_text(now.arena_bytes)}"
    for tier in now.tiers:
        state = "" if tier.up else ", DOWN"
        size = f" of {size_text(tier.size_bytes)}" if tier.size_bytes else ""
        filled = bar(tier.used_bytes / tier.size_bytes if tier.size_bytes else 0.0, BAR_CHARS)
        if away := [server.name for server in tier.servers if not server.up]:
            state += f", no answer: {', '.join(away)}"
        yield "tier", f"{filled} {size_text(tier.used_bytes)}{size}{state}: {tier.name}"
    evicted_per_s = count_text(interval.per_second(interval.count("evicted_blocks")))
    yield (
        "blocks",
        f"{count_text(now.num_entries)} entries, {count_text(now.num_leases)} leases, "
        f"{count_text(now.num_tickets)} tickets, {evicted_per_s} evicted/s",
    )
    server = interval.server
    (asked, found), (all_asked, all_found) = tokens(server), tokens(now.server)
    per_s = count_text(interval.per_second(asked))
    share_found = f"{share_text(found, asked)} of {per_s} tokens/s; {share_text(all_found, all_asked)} since the start"
    yield "hit ratio", share_found
    lookups = count_text(interval.per_second(interval.count("lookups")))
    yield "lookups", f"{lookups}/s, {lookup_latency(server)}"
    failed = sum(sum(each.buckets) for each in server.rpcs if each.status != "OK")
    if failed:
        yield "RPC errors", f"{count_text(interval.per_second(failed))}/s"
    yield "loop lag", loop_lag(server)
    for transport, moved in moved_bytes(server).items():
        rates = (f"{way} {rate_text(interval.per_second(nbytes)):>10}" for way, nbytes in moved.items())
        yield transport, "   ".join(rates)


def _usage_table(interval: Interval) -> list[Table]:
    def cells(used: pb.UsageStats) -> tuple[RenderableType, ...]:
        return (
            _name(used.model),
            _name(used.tenant or "-"),
            share_text(used.hit_tokens, used.lookup_tokens),
            count_text(interval.per_second(used.lookup_tokens)),
            rate_text(interval.per_second(used.loaded_bytes)),
            rate_text(interval.per_second(used.stored_bytes)),
            size_text(used.held_bytes),
        )

    usage = sorted(
        interval.server.usage, key=lambda each: (-each.lookup_tokens, -each.stored_bytes - each.loaded_bytes)
    )
    names = Column("model", ratio=5, overflow="fold"), Column("tenant", ratio=2, overflow="fold")
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("hits", "tokens/s", "read", "write", "held"))
    return _table([*names, *numbers], usage, cells)


def _engine_table(now: pb.StatsResponse) -> list[Table]:
    def cells(engine: pb.EngineState) -> tuple[RenderableType, ...]:
        names = map(_name, (engine.engine, engine.version, engine.vllm_version, engine.transport or "-"))
        breaker = Text("OPEN", style=_STYLES[Level.ERROR]) if engine.breaker_open else "closed"
        return (*names, breaker, f"{duration_text(engine.age_seconds)} ago")

    names = (Column(name, overflow="fold") for name in ("kvpool", "vLLM", "transport"))
    states = (Column(name, no_wrap=True) for name in ("breaker", "report"))
    return _table([Column("engine", ratio=1, overflow="fold"), *names, *states], now.engines, cells)


def _table(
    columns: Sequence[Column], found: Sequence[_T], cells: Callable[[_T], Iterable[RenderableType]]
) -> list[Table]:
    """A table of the first `MAX_ROWS` that were found; none if nothing was."""
    if not found:
        return []
    table = Table(*columns, box=None, expand=True, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    for each in found[:MAX_ROWS]:
        table.add_row(*cells(each))
    if len(found) > MAX_ROWS:
        table.add_row(f"and {len(found) - MAX_ROWS} more")
    return [table]


def _name(text: str) -> Text:
    return Text(printable(text))
