"""`kvpool stats`: what is wrong with the pool, what it holds and what it has done."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint, duration_text, printable, size_text
from kvpool.commands.output import bar, console, count_text, print_findings, say, seconds_text, share_text
from kvpool.config import DEFAULT_ENDPOINT
from kvpool.doctor.finding import notes, problems
from kvpool.doctor.judgements import judgements
from kvpool.doctor.pool_state import tokens
from kvpool.doctor.window import Window, look_twice
from kvpool.reports import EngineState
from kvpool.server_stats import ServerStats, client_transfers
from kvpool.types import PoolStats, TierStats

BAR_CHARS = 30


def stats(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show metrics that are 0, too. JSON has them always.")
    ] = False,
) -> None:
    """Show what is wrong with the pool, what it holds and what it has done, under the names of its metrics."""
    with common.client_of(endpoint) as client:
        snapshot, window = look_twice(client.admin.stats, lambda stats: bool(notes(judgements(stats))))
    if as_json:
        common.print_json(row_of(snapshot, window))
        return
    _print_summary(endpoint, snapshot, window)
    # What the snapshot has beside numbers has been printed.
    _print_metrics("pool", _metrics(snapshot), show_all=show_all)
    if snapshot.server is not None:
        console().print(_rpc_table(snapshot.server))
    for tier in snapshot.tiers:
        metrics = _metrics(tier)
        metrics["up"] = "yes" if tier.up else "no: the tier failed, and is not called for a while"
        _print_metrics(f"tier {metrics.pop('name')}", metrics, show_all=show_all)


def row_of(stats: PoolStats, window: Window | None = None) -> dict[str, Any]:
    """A snapshot as JSON; see docs/reference/commands.md."""
    asked, hit = tokens(stats)
    found = judgements(stats, window)
    return {
        **_metrics(stats),
        "tiers": [_metrics(tier) for tier in stats.tiers],
        "boot": f"{stats.boot_token:016x}",
        "lookup_tokens": asked,
        "hit_tokens": hit,
        "hit_ratio": hit / asked if asked else None,
        "engines": [_engine_row(each) for each in stats.engines],
        "quotas": [dataclasses.asdict(each) for each in stats.quotas],
        "server": None if stats.server is None else _server_row(stats.server),
        "problems": [dataclasses.asdict(finding) for finding in problems(found)],
        "notes": [dataclasses.asdict(finding) for finding in notes(found)],
    }


def _metrics(stats: PoolStats | TierStats) -> dict[str, Any]:
    """A snapshot by the names of the server's Prometheus metrics, without kvpool_, kvpool_tier_ and _total."""
    others = ("tiers", "server", "boot_token", "engines", "quotas")
    fields = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats) if field.name not in others}
    return {name.removeprefix("num_"): value for name, value in fields.items()}


def _server_row(server: ServerStats) -> dict[str, Any]:
    rpcs = []
    for each in server.rpcs:
        alone = dataclasses.replace(server, rpcs=(each,))
        quantiles = {f"p{share}_seconds": alone.quantile(each.method, share / 100) for share in (50, 99)}
        rpcs.append({**dataclasses.asdict(each), "count": each.count, **quantiles})
    return {**dataclasses.asdict(server), "rpcs": rpcs}


def _engine_row(engine: EngineState) -> dict[str, Any]:
    return {**dataclasses.asdict(engine), "namespaces": [each.hex() for each in engine.namespaces]}


def _print_summary(endpoint: str, stats: PoolStats, window: Window | None) -> None:
    server = stats.server
    version, since = "", ""
    if server is not None:
        version, since = f" {printable(server.version)}", f", up for {duration_text(server.uptime_seconds)}"
    say(f"kvpool-server{version} at {endpoint}{since}")
    found = judgements(stats, window)
    print_findings(problems(found))
    if not problems(found):
        typer.echo("ok      nothing is wrong with the pool")
    print_findings(notes(found))
    for line in _summary(stats):
        typer.echo(line)


def _summary(stats: PoolStats) -> Iterator[str]:
    used = stats.arena_bytes - stats.free_bytes
    share = used / stats.arena_bytes if stats.arena_bytes else 0.0
    yield f"memory      {bar(share, BAR_CHARS)} {share:.0%} of {size_text(stats.arena_bytes)}"
    asked, found = tokens(stats)
    counters = stats.counters
    if asked:
        yield f"hit ratio   {share_text(found, asked)} of {count_text(asked)} tokens"
    elif blocks := counters.get("lookup_blocks", 0):
        yield f"hit ratio   {share_text(counters.get('lookup_hits', 0), blocks)} of {count_text(blocks)} blocks"
    if (server := stats.server) is not None:
        p50, p99 = (seconds_text(server.quantile("Lookup", share)) for share in (0.5, 0.99))
        if lookups := server.count("Lookup"):
            yield f"lookups     {count_text(lookups)}: p50 {p50}, p99 {p99}"
        lag = seconds_text(server.loop_lag_p50_seconds), seconds_text(server.loop_lag_max_seconds)
        yield f"loop lag    p50 {lag[0]}, max {lag[1]} in the last minute"
        transfers = (*client_transfers(server.transfers, server.usage), *server.transfers)
        for transport in dict.fromkeys(each.transport for each in transfers):
            moved = [each for each in transfers if each.transport == transport]
            sizes = ", ".join(f"{each.direction} {size_text(each.nbytes)}" for each in moved)
            yield printable(f"{transport:<12}{sizes}")


def _print_metrics(title: str, metrics: dict[str, Any], *, show_all: bool) -> None:
    """A table of metrics; without `show_all` of those that are not 0, and a line that counts the others."""
    table = Table("metric", Column("value", justify="right"), title=escape(title), title_justify="left")
    values = {name: value for name, value in metrics.items() if name != "counters"}
    for name, value in (*values.items(), *sorted(metrics["counters"].items())):
        if value or show_all:
            table.add_row(name, escape(value) if isinstance(value, str) else _value_text(name, value))
    num_left_out = len(values) + len(metrics["counters"]) - table.row_count
    if table.row_count:
        console().print(table)
    if num_left_out:
        say(f"{title}: {num_left_out} more metrics are 0; --all shows them")


def _value_text(name: str, value: int) -> str:
    return size_text(value) if name.endswith("_bytes") else f"{value:,}"


def _rpc_table(server: ServerStats) -> Table:
    right = [Column(name, justify="right") for name in ("count", "p50", "p99")]
    table = Table("rpc_seconds", "status", *right, title="RPCs", title_justify="left")
    for each in server.rpcs:
        alone = dataclasses.replace(server, rpcs=(each,))
        quantiles = [seconds_text(alone.quantile(each.method, share)) for share in (0.5, 0.99)]
        table.add_row(escape(each.method), escape(each.status), count_text(each.count), *quantiles)
    return table
