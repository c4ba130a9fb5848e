"""One frame of `kvpool top`: what a pool does now, as rich renderables of any width from 80 columns.

Models, tenants, engines and tiers are named by others: each name is made printable, and none is read as markup.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kvpool.doctor.judgements import Window, judgements, tokens
from kvpool.protocol.reports import rpc_quantile, since
from kvpool.protocol.text import duration_text, printable
from kvpool.report.finding import Level, problems
from kvpool.report.output import MARKS, bar, count_text, rate_text, seconds_text, share_text
from kvpool.report.quotas import size_text
from kvpool.v1 import pool_pb2 as pb

BAR_CHARS = 30
MAX_PROBLEMS = 4
MAX_ROWS = 12
"""Most rows of each table."""
LABEL_CHARS = 11
_STYLES = {Level.ERROR: "bold red", Level.WARNING: "yellow", Level.INFO: "", Level.OK: ""}


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
    window: Window | None = None
    trouble: str = ""
    silent_s: float = 0.0


def frame(view: View) -> RenderableType:
    """All of one frame."""
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
    parts += [table for table in (_usage_table(interval), _engine_table(interval.now)) if table is not None]
    return Group(*parts)


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
    yield "hit ratio", _hit_ratio(interval)
    yield from _server_lines(interval)


def _hit_ratio(interval: Interval) -> str:
    asked, found = tokens(interval.server)
    all_asked, all_found = tokens(interval.now.server)
    per_s = count_text(interval.per_second(asked))
    return f"{share_text(found, asked)} of {per_s} tokens/s; {share_text(all_found, all_asked)} since the start"


def _server_lines(interval: Interval) -> Iterator[tuple[str, str]]:
    server = interval.server
    lookups = count_text(interval.per_second(interval.count("lookups")))
    yield "lookups", f"{lookups}/s, {lookup_latency(server)}"
    failed = sum(sum(each.buckets) for each in server.rpcs if each.status != "OK")
    if failed:
        yield "RPC errors", f"{count_text(interval.per_second(failed))}/s"
    yield "loop lag", loop_lag(server)
    for transport, moved in moved_bytes(server).items():
        rates = (f"{way} {rate_text(interval.per_second(nbytes)):>10}" for way, nbytes in moved.items())
        yield transport, "   ".join(rates)


def _usage_table(interval: Interval) -> Table | None:
    usage = sorted(
        interval.server.usage, key=lambda each: (-each.lookup_tokens, -each.stored_bytes - each.loaded_bytes)
    )
    if not usage:
        return None
    numbers = [Column(name, justify="right", no_wrap=True) for name in ("hits", "tokens/s", "read", "write", "held")]
    table = _table(Column("model", ratio=5, overflow="fold"), Column("tenant", ratio=2, overflow="fold"), *numbers)
    for each in usage[:MAX_ROWS]:
        table.add_row(
            _name(each.model),
            _name(each.tenant or "-"),
            share_text(each.hit_tokens, each.lookup_tokens),
            count_text(interval.per_second(each.lookup_tokens)),
            rate_text(interval.per_second(each.loaded_bytes)),
            rate_text(interval.per_second(each.stored_bytes)),
            size_text(each.held_bytes),
        )
    if len(usage) > MAX_ROWS:
        table.add_row(f"and {len(usage) - MAX_ROWS} more")
    return table


def _engine_table(now: pb.StatsResponse) -> Table | None:
    engines = now.engines
    if not engines:
        return None
    known = (Column(name, overflow="fold") for name in ("kvpool", "vLLM", "transport"))
    states = (Column(name, no_wrap=True) for name in ("breaker", "report"))
    table = _table(Column("engine", ratio=1, overflow="fold"), *known, *states)
    for each in engines[:MAX_ROWS]:
        breaker = Text("OPEN", style=_STYLES[Level.ERROR]) if each.breaker_open else Text("closed")
        names = map(_name, (each.engine, each.version, each.vllm_version, each.transport or "-"))
        table.add_row(*names, breaker, f"{duration_text(each.age_seconds)} ago")
    if len(engines) > MAX_ROWS:
        table.add_row(f"and {len(engines) - MAX_ROWS} more")
    return table


def _table(*columns: Column) -> Table:
    return Table(*columns, box=None, expand=True, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)


def _name(text: str) -> Text:
    return Text(printable(text))
