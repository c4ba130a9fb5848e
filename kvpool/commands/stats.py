"""`kvpool stats`: what is wrong with the pool, what it holds and what it has done."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint
from kvpool.commands.top import BAR_CHARS, heading, lookup_latency, loop_lag, moved_bytes
from kvpool.protocol.messages import fields_of
from kvpool.protocol.reports import quantile
from kvpool.protocol.text import size_text
from kvpool.report.judgements import Finding, judge_twice, notes, problems, tokens
from kvpool.report.output import bar, console, count_text, print_findings, say, seconds_text, share_text
from kvpool.v1 import pool_pb2 as pb


def stats(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show metrics that are 0, too. JSON has them always.")
    ] = False,
) -> None:
    """Show what is wrong with the pool, what it holds and what it has done, under the names of its metrics."""
    with common.client_of(endpoint) as client:
        snapshot, found = judge_twice(client.admin.stats)
    if as_json:
        common.print_json(row_of(snapshot, found))
        return
    say(heading(endpoint, snapshot))
    print_findings(problems(found))
    if not problems(found):
        typer.echo("ok      nothing is wrong with the pool")
    print_findings(notes(found))
    for line in _summary(snapshot):
        typer.echo(line)
    numbers = _metrics(fields_of(snapshot))
    for name in ("tiers", "server", "engines", "quotas"):
        del numbers[name]
    _print_metrics("pool", numbers, show_all=show_all)
    _print_rpcs(snapshot.server)
    for tier in snapshot.tiers:
        metrics = _metrics(fields_of(tier))
        for server in metrics.pop("servers"):
            metrics |= {f"{server['name']} {name}": server[name] for name in ("read_bytes", "key") if server[name]}
        metrics["up"] = "yes" if tier.up else "no: the tier failed, and is not called for a while"
        _print_metrics(f"tier {metrics.pop('name')}", metrics, show_all=show_all)


def row_of(stats: pb.StatsResponse, found: Sequence[Finding]) -> dict[str, Any]:
    """A snapshot and its judgements as JSON; see docs/reference/commands.md."""
    asked, hit = tokens(stats.server)
    row = _metrics(fields_of(stats))
    for each, rpc in zip(row["server"]["rpcs"], stats.server.rpcs, strict=True):
        p50, p99 = _quantiles(stats.server, rpc)
        each |= {"count": sum(rpc.buckets), "p50_seconds": p50, "p99_seconds": p99}
    return {
        **row,
        "tiers": [_metrics(tier) for tier in row["tiers"]],
        "boot": f"{stats.boot_token:016x}",
        "lookup_tokens": asked,
        "hit_tokens": hit,
        "hit_ratio": hit / asked if asked else None,
        "problems": [dataclasses.asdict(finding) for finding in problems(found)],
        "notes": [dataclasses.asdict(finding) for finding in notes(found)],
    }


def _metrics(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields by the names of the server's Prometheus metrics, without kvpool_, kvpool_tier_ and _total."""
    return {name.removeprefix("num_"): value for name, value in fields.items()}


def _quantiles(server: pb.ServerStats, rpc: pb.RpcStats) -> list[float | None]:
    """Median and 99th percentile of the RPC's seconds."""
    return [quantile(server.rpc_seconds_bounds, [rpc.buckets], share) for share in (0.5, 0.99)]


def _summary(stats: pb.StatsResponse) -> Iterator[str]:
    used = stats.arena_bytes - stats.free_bytes
    share = used / stats.arena_bytes if stats.arena_bytes else 0.0
    yield f"memory      {bar(share, BAR_CHARS)} {share:.0%} of {size_text(stats.arena_bytes)}"
    asked, found = tokens(stats.server)
    counters = stats.counters
    if asked:
        yield f"hit ratio   {share_text(found, asked)} of {count_text(asked)} tokens"
    elif blocks := counters.get("lookup_blocks", 0):
        yield f"hit ratio   {share_text(counters.get('lookup_hits', 0), blocks)} of {count_text(blocks)} blocks"
    server = stats.server
    if lookups := counters.get("lookups", 0):
        yield f"lookups     {count_text(lookups)}: {lookup_latency(server)}"
    yield f"loop lag    {loop_lag(server)}"
    for transport, moved in moved_bytes(server).items():
        sizes = ", ".join(f"{direction} {size_text(nbytes)}" for direction, nbytes in moved.items())
        yield f"{transport:<12}{sizes}"


def _print_metrics(title: str, metrics: dict[str, Any], *, show_all: bool) -> None:
    """A table of metrics; without `show_all` of those that are not 0, and a line that counts the others."""
    columns = Column("metric", overflow="fold"), Column("value", justify="right")
    table = Table(*columns, title=escape(title), title_justify="left")
    values = {name: value for name, value in metrics.items() if name != "counters"}
    for name, value in (*values.items(), *sorted(metrics["counters"].items())):
        if value or show_all:
            if not isinstance(value, str):
                value = size_text(value) if name.endswith("_bytes") else f"{value:,}"
            table.add_row(escape(name), escape(value))
    num_left_out = len(values) + len(metrics["counters"]) - table.row_count
    if table.row_count:
        console().print(table)
    if num_left_out:
        say(f"{title}: {num_left_out} more metrics are 0; --all shows them")


def _print_rpcs(server: pb.ServerStats) -> None:
    right = [Column(name, justify="right") for name in ("count", "p50", "p99")]
    table = Table("rpc_seconds", "status", *right, title="RPCs", title_justify="left")
    for each in server.rpcs:
        quantiles = map(seconds_text, _quantiles(server, each))
        table.add_row(escape(each.method), escape(each.status), count_text(sum(each.buckets)), *quantiles)
    console().print(table)
