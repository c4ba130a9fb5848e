"""`kvpool stats`: what is wrong with the pool, what it holds and what it has done."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint, duration_text, size_text
from kvpool.doctor.judgements import judgements
from kvpool.doctor.pool_state import tokens
from kvpool.doctor.window import Window, look_twice
from kvpool.protocol.messages import fields_of
from kvpool.protocol.server_stats import client_transfers, count, quantile, rpc_quantile
from kvpool.report.finding import notes, problems
from kvpool.report.output import bar, console, count_text, print_findings, say, seconds_text, share_text
from kvpool.v1 import pool_pb2 as pb

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
    whole = _metrics(fields_of(snapshot))
    others = ("tiers", "server", "boot_token", "engines", "quotas")
    _print_metrics("pool", {name: each for name, each in whole.items() if name not in others}, show_all=show_all)
    if snapshot.HasField("server"):
        console().print(_rpc_table(snapshot.server))
    for tier in snapshot.tiers:
        metrics = _metrics(fields_of(tier))
        metrics["up"] = "yes" if tier.up else "no: the tier failed, and is not called for a while"
        _print_metrics(f"tier {metrics.pop('name')}", metrics, show_all=show_all)


def row_of(stats: pb.StatsResponse, window: Window | None = None) -> dict[str, Any]:
    """A snapshot as JSON; see docs/reference/commands.md."""
    asked, hit = tokens(stats)
    found = judgements(stats, window)
    row = _metrics(fields_of(stats))
    boot_token = row.pop("boot_token")
    if row["server"] is not None:
        for each, rpc in zip(row["server"]["rpcs"], stats.server.rpcs, strict=True):
            quantiles = [quantile(stats.server.rpc_seconds_bounds, [rpc.buckets], share) for share in (0.5, 0.99)]
            each |= {"count": sum(rpc.buckets), "p50_seconds": quantiles[0], "p99_seconds": quantiles[1]}
    return {
        **row,
        "tiers": [_metrics(tier) for tier in row["tiers"]],
        "boot": f"{boot_token:016x}",
        "lookup_tokens": asked,
        "hit_tokens": hit,
        "hit_ratio": hit / asked if asked else None,
        "problems": [dataclasses.asdict(finding) for finding in problems(found)],
        "notes": [dataclasses.asdict(finding) for finding in notes(found)],
    }


def _metrics(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields by the names of the server's Prometheus metrics, without kvpool_, kvpool_tier_ and _total."""
    return {name.removeprefix("num_"): value for name, value in fields.items()}


def _print_summary(endpoint: str, stats: pb.StatsResponse, window: Window | None) -> None:
    version, since = "", ""
    if stats.HasField("server"):
        version, since = f" {stats.server.version}", f", up for {duration_text(stats.server.uptime_seconds)}"
    say(f"kvpool-server{version} at {endpoint}{since}")
    found = judgements(stats, window)
    print_findings(problems(found))
    if not problems(found):
        typer.echo("ok      nothing is wrong with the pool")
    print_findings(notes(found))
    for line in _summary(stats):
        typer.echo(line)


def _summary(stats: pb.StatsResponse) -> Iterator[str]:
    used = stats.arena_bytes - stats.free_bytes
    share = used / stats.arena_bytes if stats.arena_bytes else 0.0
    yield f"memory      {bar(share, BAR_CHARS)} {share:.0%} of {size_text(stats.arena_bytes)}"
    asked, found = tokens(stats)
    counters = stats.counters
    if asked:
        yield f"hit ratio   {share_text(found, asked)} of {count_text(asked)} tokens"
    elif blocks := counters.get("lookup_blocks", 0):
        yield f"hit ratio   {share_text(counters.get('lookup_hits', 0), blocks)} of {count_text(blocks)} blocks"
    if stats.HasField("server"):
        server = stats.server
        p50, p99 = (seconds_text(rpc_quantile(server, "Lookup", share)) for share in (0.5, 0.99))
        if lookups := count(server.rpcs, "Lookup"):
            yield f"lookups     {count_text(lookups)}: p50 {p50}, p99 {p99}"
        lag = seconds_text(server.loop_lag_p50_seconds), seconds_text(server.loop_lag_max_seconds)
        yield f"loop lag    p50 {lag[0]}, max {lag[1]} in the last minute"
        transfers = (*client_transfers(server.transfers, server.usage), *server.transfers)
        for transport in dict.fromkeys(each.transport for each in transfers):
            moved = [each for each in transfers if each.transport == transport]
            sizes = ", ".join(f"{each.direction} {size_text(each.nbytes)}" for each in moved)
            yield f"{transport:<12}{sizes}"


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


def _rpc_table(server: pb.ServerStats) -> Table:
    right = [Column(name, justify="right") for name in ("count", "p50", "p99")]
    table = Table("rpc_seconds", "status", *right, title="RPCs", title_justify="left")
    for each in server.rpcs:
        bounds, buckets = server.rpc_seconds_bounds, each.buckets
        quantiles = [seconds_text(quantile(bounds, [buckets], share)) for share in (0.5, 0.99)]
        table.add_row(escape(each.method), escape(each.status), count_text(sum(buckets)), *quantiles)
    return table
