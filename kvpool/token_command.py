"""`kvpool token`: bearer tokens for callers without a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpool.certificates import write_whole
from kvpool.errors import InvalidRequestError
from kvpool.principal import ALL_TENANTS, DEFAULT_DOMAIN, Principal, Role
from kvpool.tokens import append_record, create_token, parse_lifetime

app = typer.Typer(no_args_is_help=True, help="Make bearer tokens, for callers that have no certificate.")


@app.callback()
def _group() -> None:
    """Make bearer tokens, for callers that have no certificate."""


@app.command()
def create(
    role: Annotated[Role, typer.Option(help="What the token allows.")],
    file: Annotated[
        Path, typer.Option("--file", help="The server's file of tokens (--tokens), which gets its SHA-256.")
    ],
    tenant: Annotated[str, typer.Option(help="Whose it is; for the roles of a tenant.")] = "",
    expires: Annotated[str, typer.Option(help="Lifetime: hours, days or weeks, such as 12h, 90d or 4w.")] = "90d",
    domain: Annotated[str, typer.Option(help="Trust domain.")] = DEFAULT_DOMAIN,
    out: Annotated[
        Path | None, typer.Option(help="Write the token to this file, which only its owner can read; or print it.")
    ] = None,
) -> None:
    """Make a new token, show it once, and let the server know it."""
    if role.has_tenant and not tenant:
        raise InvalidRequestError(f"role {role} belongs to a tenant; give --tenant")
    if tenant and not role.has_tenant:
        raise InvalidRequestError(f"role {role} belongs to no tenant; leave out --tenant")
    token, record = create_token(Principal(tenant or ALL_TENANTS, role, domain), parse_lifetime(expires))
    append_record(file, record)
    if out is None:
        typer.echo(token)
    else:
        write_whole(out, f"{token}\n".encode(), secret=True)
    typer.echo(
        f"kvpool: {record.principal} until {record.ends_at:%Y-%m-%d %H:%M} UTC; nobody can print it again", err=True
    )
