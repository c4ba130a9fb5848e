"""`kvpool quota`: sets and lists quotas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from kvpool.client.client import Client
from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint
from kvpool.protocol.errors import InvalidRequestError, PermissionDeniedError
from kvpool.protocol.messages import fields_of
from kvpool.protocol.types import Quota
from kvpool.report.output import console, say
from kvpool.report.quotas import beyond_memory, parse_quota, size_text
from kvpool.v1 import pool_pb2 as pb

_WHAT_COUNTS = (
    "Used is the memory that is taken: it includes blocks that are being written, and where callers are authenticated "
    "the whole extents that a tenant's blocks lie in. `kvpool namespaces` counts stored blocks alone, and shows less."
)


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
    """Set and list quotas: how much of the arena tenants or namespaces may hold. They last until the server stops."""
    wanted = [parse_quota(text) for text in quotas or ()]
    for text, asked in zip(quotas or (), wanted, strict=True):
        if asked.limit_bytes and text.strip()[-1].isdigit():  # Most who forget the unit would evict nearly all.
            raise InvalidRequestError(f"quota {text!r} has no unit; give {text}GiB, or {text}B if you mean bytes")
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
