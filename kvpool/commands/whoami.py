"""`kvpool whoami`: who a server takes the caller for."""

from __future__ import annotations

import time

import typer

from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint
from kvpool.protocol.messages import fields_of
from kvpool.protocol.text import duration_text


def whoami(endpoint: Endpoint = DEFAULT_ENDPOINT, as_json: AsJson = False) -> None:
    """Show who the server takes you for, what you may call, and when your certificate or token ends."""
    with common.client_of(endpoint) as client:
        found = client.admin.whoami()
    if as_json:
        row = fields_of(found)
        del row["boot_token"]
        common.print_json(row)
        return
    typer.echo(found.principal or f"{endpoint} does not authenticate callers")
    if found.ends_at:
        left = duration_text(found.ends_at - time.time())
        typer.echo(f"    until {time.strftime('%Y-%m-%d %H:%M', time.gmtime(found.ends_at))} UTC, for {left}")
    typer.echo(f"    may call {', '.join(found.methods)}")
