"""`kvpool namespaces`: what each namespace holds, and why two of them share no blocks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint, one_of
from kvpool.protocol.messages import fields_of
from kvpool.protocol.namespace import differences
from kvpool.protocol.text import duration_text, opened_text, printable
from kvpool.protocol.wire import decode_spec
from kvpool.report.output import console, share_text
from kvpool.report.quotas import covers, size_text
from kvpool.v1 import pool_pb2 as pb


def namespaces(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Only print the fields in which namespaces A and B differ (fingerprints, or their first characters).",
        ),
    ] = None,
) -> None:
    """List the namespaces and what each holds; --diff shows why two engines do not share blocks."""
    if diff is not None:
        _print_differences(endpoint, diff, as_json)
        return
    with common.client_of(endpoint) as client:
        found = client.admin.namespaces()
        bounds = client.admin.quotas()
    if as_json:
        common.print_json([_row(info, bounds) for info in found])
        return
    typer.echo(f"at {endpoint}:" if found else f"no namespaces at {endpoint}")
    for info in found:
        typer.echo(text_of(info, [quota for quota in bounds if _covers(quota, info)]))


def text_of(info: pb.NamespaceInfo, bounds: Sequence[pb.Quota]) -> str:
    """A namespace as a line with its fingerprint and model, and lines of facts."""
    limits = "".join(f" of {size_text(quota.limit_bytes)}" for quota in bounds)
    facts = [f"{info.num_entries:,} blocks, {size_text(info.nbytes)}{limits}"]
    if info.lookup_blocks:
        facts.append(f"hit ratio {share_text(info.lookup_hits, info.lookup_blocks)} of {info.lookup_blocks:,} blocks")
    if info.spec.tenant:
        facts.append(f"tenant {info.spec.tenant}")
    if info.pinned_bytes:
        facts.append(f"{size_text(info.pinned_bytes)} pinned")
    if info.superseded:
        facts.append("superseded")
    lines = [
        f"{info.fingerprint.hex()[:12]}  {info.spec.model}",
        "; ".join(facts),
        f"{_opened(info)}; last used {duration_text(info.idle_seconds)} ago",
        *(f"in {tier.tier}: {tier.num_entries:,} blocks, {size_text(tier.nbytes)}" for tier in info.tiers),
    ]
    return "\n    ".join(lines)


def _row(info: pb.NamespaceInfo, bounds: Sequence[pb.Quota]) -> dict[str, Any]:
    row = fields_of(info)
    del row["spec"]
    shown = {"entries": row.pop("num_entries"), "bytes": row.pop("nbytes"), **row}
    hit_ratio = info.lookup_hits / info.lookup_blocks if info.lookup_blocks else None
    quotas = [fields_of(quota) for quota in bounds if _covers(quota, info)]
    return {**shown, "hit_ratio": hit_ratio, "quotas": quotas, **dataclasses.asdict(decode_spec(info.spec))}


def _opened(info: pb.NamespaceInfo) -> str:
    return opened_text(info.opened_by, info.age_seconds)


def _covers(quota: pb.Quota, info: pb.NamespaceInfo) -> bool:
    return covers(quota.subject, info.spec.tenant, info.fingerprint)


def _print_differences(endpoint: str, prefixes: tuple[str, str], as_json: bool) -> None:
    with common.client_of(endpoint) as client:
        known = {info.fingerprint: info for info in client.admin.namespaces(holdings=False)}
        a, b = (one_of(list(known), prefix) for prefix in prefixes)
    found = differences(*(decode_spec(known[name].spec) for name in (a, b)))
    rows = [(each.field, each.ours, each.theirs) for each in found]  # Of secrets the server sends digests.
    if as_json:
        common.print_json([{"field": field, "a": ours, "b": theirs} for field, ours, theirs in rows])
        return
    if not rows:
        typer.echo(f"{a.hex()[:12]} and {b.hex()[:12]} at {endpoint} differ in no field")
        return
    # Rich would read text in brackets as markup, and engines choose the names of hosts and models.
    for each in (a, b):
        typer.echo(printable(f"{each.hex()[:12]}: {_opened(known[each])}"))
    columns = [Column(each.hex()[:12], overflow="fold") for each in (a, b)]
    table = Table(Column("field", overflow="fold"), *columns, title=escape(f"differences at {endpoint}"))
    for field, ours, theirs in rows:
        table.add_row(
            escape(field), *(escape(value if isinstance(value, str) else json.dumps(value)) for value in (ours, theirs))
        )
    console().print(table)
