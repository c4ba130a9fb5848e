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
    covering = [
        [quota for quota in bounds if covers(quota.subject, info.spec.tenant, info.fingerprint)] for info in found
    ]
    if as_json:
        common.print_json([_row(*each) for each in zip(found, covering, strict=True)])
        return
    typer.echo(f"at {endpoint}:" if found else f"no namespaces at {endpoint}")
    for each in zip(found, covering, strict=True):
        typer.echo(text_of(*each))


def text_of(info: pb.NamespaceInfo, quotas: Sequence[pb.Quota]) -> str:
    """A namespace and its quotas as a line with its fingerprint and model, and lines of facts."""
    limits = "".join(f" of {size_text(quota.limit_bytes)}" for quota in quotas)
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
        f"{opened_text(info.opened_by, info.age_seconds)}; last used {duration_text(info.idle_seconds)} ago",
        *(f"in {tier.tier}: {tier.num_entries:,} blocks, {size_text(tier.nbytes)}" for tier in info.tiers),
    ]
    return "\n    ".join(lines)


def _row(info: pb.NamespaceInfo, quotas: Sequence[pb.Quota]) -> dict[str, Any]:
    row = fields_of(info)
    del row["spec"]
    shown = {"entries": row.pop("num_entries"), "bytes": row.pop("nbytes"), **row}
    hit_ratio = info.lookup_hits / info.lookup_blocks if info.lookup_blocks else None
    told = {"hit_ratio": hit_ratio, "quotas": [fields_of(quota) for quota in quotas]}
    return {**shown, **told, **dataclasses.asdict(decode_spec(info.spec))}


def _print_differences(endpoint: str, prefixes: tuple[str, str], as_json: bool) -> None:
    with common.client_of(endpoint) as client:
        known = {info.fingerprint: info for info in client.admin.namespaces(holdings=False)}
        a, b = (one_of(list(known), prefix) for prefix in prefixes)
    found = differences(*(decode_spec(known[name].spec) for name in (a, b)))
    if as_json:  # Of secrets the server sends digests.
        common.print_json([{"field": each.field, "a": each.ours, "b": each.theirs} for each in found])
        return
    if not found:
        typer.echo(f"{a.hex()[:12]} and {b.hex()[:12]} at {endpoint} differ in no field")
        return
    # Rich would read text in brackets as markup, and engines choose the names of hosts and models.
    for info in (known[a], known[b]):
        typer.echo(printable(f"{info.fingerprint.hex()[:12]}: {opened_text(info.opened_by, info.age_seconds)}"))
    columns = [Column(name, overflow="fold") for name in ("field", a.hex()[:12], b.hex()[:12])]
    table = Table(*columns, title=escape(f"differences at {endpoint}"))
    for each in found:
        values = (value if isinstance(value, str) else json.dumps(value) for value in (each.ours, each.theirs))
        table.add_row(escape(each.field), *map(escape, values))
    console().print(table)
