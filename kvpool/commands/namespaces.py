"""`kvpool namespaces`, `clear` and `quota`: what namespaces hold, why they share nothing, and what they may hold."""

from __future__ import annotations

import dataclasses
import json
import string
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from kvpool.client.client import Client
from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint, find_namespaces
from kvpool.protocol.errors import InvalidRequestError, PermissionDeniedError
from kvpool.protocol.messages import fields_of
from kvpool.protocol.namespace import differences
from kvpool.protocol.text import beyond_memory, covers, duration_text, opened_text, parse_quota, printable, size_text
from kvpool.protocol.types import HASH_BYTES, Quota
from kvpool.protocol.wire import decode_spec
from kvpool.report.output import console, say, share_text
from kvpool.v1 import pool_pb2 as pb

_WHAT_COUNTS = (
    "Used is the memory that is taken: it includes blocks that are being written, and where callers are authenticated "
    "the whole extents that a tenant's blocks lie in. `kvpool namespaces` counts stored blocks alone, and shows less."
)


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
        quotas = client.admin.quotas()
    covered = [
        (each, [quota for quota in quotas if covers(quota.subject, each.spec.tenant, each.fingerprint)])
        for each in found
    ]
    if as_json:
        common.print_json([_row(*each) for each in covered])
        return
    typer.echo(f"at {endpoint}:" if found else f"no namespaces at {endpoint}")
    for each in covered:
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
        infos = find_namespaces(client, *prefixes)
    found = differences(*(decode_spec(info.spec) for info in infos))
    if as_json:  # Of secrets the server sends digests.
        common.print_json([{"field": each.field, "a": each.ours, "b": each.theirs} for each in found])
        return
    a, b = (info.fingerprint.hex()[:12] for info in infos)
    if not found:
        typer.echo(f"{a} and {b} at {endpoint} differ in no field")
        return
    # Rich would read text in brackets as markup, and engines choose the names of hosts and models.
    for info in infos:
        typer.echo(printable(f"{info.fingerprint.hex()[:12]}: {opened_text(info.opened_by, info.age_seconds)}"))
    columns = [Column(name, overflow="fold") for name in ("field", a, b)]
    table = Table(*columns, title=escape(f"differences at {endpoint}"))
    for each in found:
        values = (value if isinstance(value, str) else json.dumps(value) for value in (each.ours, each.theirs))
        table.add_row(escape(each.field), *map(escape, values))
    console().print(table)


def clear(
    context: typer.Context,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    namespace: Annotated[
        str | None, typer.Option(help="Fingerprint, or its first characters, as `kvpool namespaces` shows it.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Drop the blocks of every namespace.")] = False,
) -> None:
    """Drop every block of one namespace, or of all."""
    if context.args:
        name = context.args[0]
        raise InvalidRequestError(f"{name!r} names nothing to drop; give --namespace {name}, or --all")
    if everything == (namespace is not None):
        raise InvalidRequestError("give either --namespace, or --all to drop the blocks of every model")
    with common.client_of(endpoint) as client:
        fingerprint = b"" if namespace is None else _fingerprint(client, namespace)
        whose = "all namespaces" if namespace is None else f"namespace {fingerprint.hex()[:12]}"
        num_dropped = client.admin.clear(fingerprint, timeout_ms=common.SLOW_TIMEOUT_MS)
    typer.echo(f"dropped {num_dropped:,} blocks of {whose} at {endpoint}")


def _fingerprint(client: Client, prefix: str) -> bytes:
    if not prefix:
        raise InvalidRequestError("--namespace is empty; give a fingerprint, or --all for every namespace")
    if len(prefix) == 2 * HASH_BYTES and not prefix.strip(string.hexdigits):
        return bytes.fromhex(prefix)  # After a restart only a tier may know the namespace.
    (found,) = find_namespaces(client, prefix)
    return found.fingerprint


def quota(
    quotas: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SUBJECT=SIZE",
            help="tenant:NAME=20GiB, or namespace:PREFIX=20GiB with the first characters of a fingerprint; SUBJECT=0 "
            "removes a quota. Without any: list the quotas.",
        ),
    ] = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
) -> None:
    """Set and list quotas: how much of the arena tenants or namespaces may hold. They last as long as its memory."""
    wanted = [parse_quota(text) for text in quotas or ()]
    with common.client_of(endpoint) as client:
        found = client.admin.set_quotas(wanted) if wanted else client.admin.quotas()
        warning = _beyond_memory(client, found)
        budgets = client.admin.pin_budgets()
    if warning:
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        common.print_json([fields_of(quota) for quota in found])
        return
    if found:
        numbers = [Column(name, justify="right") for name in ("limit", "used", "share used")]
        table = Table(Column("subject", overflow="fold"), *numbers, title=escape(f"quotas at {endpoint}"))
        for known in found:
            share = f"{known.used_bytes / max(1, known.limit_bytes):.0%}"
            table.add_row(escape(known.subject), size_text(known.limit_bytes), size_text(known.used_bytes), share)
        console().print(table)
        say(_WHAT_COUNTS)
    else:
        typer.echo(f"no quotas at {endpoint}: every tenant and namespace may fill the arena")
    for each in budgets:
        if each.used_bytes:
            tenant = f"tenant {each.tenant}" if each.tenant else "the tenant without a name"
            say(f"{tenant} has pinned {size_text(each.used_bytes)} of {size_text(each.limit_bytes)}")


def _beyond_memory(client: Client, quotas: Sequence[pb.Quota]) -> str:
    """As `beyond_memory`; empty for a tenant's operator, to whom the server tells neither its memory nor all quotas."""
    try:
        limits = [Quota(each.subject, each.limit_bytes) for each in quotas]
        return beyond_memory(limits, client.admin.stats().arena_bytes) if limits else ""
    except PermissionDeniedError:
        return ""
