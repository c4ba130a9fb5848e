"""`kvpool stats`: what the pool holds and has done."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint
from kvpool.config import DEFAULT_ENDPOINT
from kvpool.types import PoolStats, TierStats


def stats(endpoint: Endpoint = DEFAULT_ENDPOINT, as_json: AsJson = False) -> None:
    """Show what the pool holds and has done, under the names of its metrics."""
    with common.client_of(endpoint) as client:
        snapshot = client.admin.stats()
    tiers = [_metrics(tier) for tier in snapshot.tiers]
    pool = {**_metrics(snapshot), "tiers": tiers}
    if as_json:
        common.print_json(pool)
        return
    table = _metrics_table(f"kvpool-server at {endpoint}", pool)
    if snapshot.counters.get("lookup_blocks"):
        ratio = snapshot.counters.get("lookup_hits", 0) / snapshot.counters["lookup_blocks"]
        table.add_row("lookup hit ratio", f"{ratio:.1%}")
    Console().print(table)
    for tier in tiers:
        tier["up"] = "yes" if tier["up"] else "no: the tier failed, and is not called for a while"
        Console().print(_metrics_table(escape(f"tier {tier.pop('name')}"), tier))


def _metrics(stats: PoolStats | TierStats) -> dict[str, Any]:
    """A snapshot by the names of the server's Prometheus metrics, without kvpool_, kvpool_tier_ and _total."""
    return {name.removeprefix("num_"): value for name, value in dataclasses.asdict(stats).items()}


def _metrics_table(title: str, metrics: dict[str, Any]) -> Table:
    table = Table("metric", "value", title=title)
    values = {name: value for name, value in metrics.items() if name not in ("counters", "tiers")}
    for name, value in (*values.items(), *sorted(metrics["counters"].items())):
        table.add_row(name, escape(value) if isinstance(value, str) else f"{value:,}")
    return table
