"""`kvpool token`: bearer tokens for callers without a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpool.commands.common import AsJson, end_text, minute_text, print_json
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.text import printable
from kvpool.security.certificates import write_whole
from kvpool.security.principal import ABOUT_DOMAINS, ALL_TENANTS, DEFAULT_DOMAIN, Principal, Role
from kvpool.security.tokens import TokenRecord, append_record, create_token, parse_lifetime, read_records, remove_record

app = typer.Typer(no_args_is_help=True, help="Make, list and revoke bearer tokens, of callers without a certificate.")

TokensFile = Annotated[Path, typer.Argument(metavar="FILE", help="The server's file of tokens (--tokens).")]


@app.command()
def create(
    role: Annotated[Role, typer.Option(help="What the token allows.")],
    file: Annotated[
        Path, typer.Option("--file", help="The server's file of tokens (--tokens), which gets its SHA-256.")
    ],
    tenant: Annotated[str, typer.Option(help="Whose it is; for the roles of a tenant.")] = "",
    expires: Annotated[str, typer.Option(help="Lifetime: hours, days or weeks, such as 12h, 90d or 4w.")] = "90d",
    domain: Annotated[str, typer.Option(help=ABOUT_DOMAINS)] = DEFAULT_DOMAIN,
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
    typer.echo(f"kvpool: {record.principal} until {minute_text(record.ends_at)}; nobody can print it again", err=True)


@app.command("list")
def list_tokens(file: TokensFile, as_json: AsJson = False) -> None:
    """Show the tokens of a server's file: the id, whose each is, when it was made, and when it ends; no secrets."""
    found = sorted(read_records(file).values(), key=lambda record: (str(record.principal), record.ends_at))
    if as_json:
        print_json([_row(record) for record in found])
        return
    for record in found:
        created = "" if record.created_at is None else f"created {minute_text(record.created_at)}; "
        lines = [f"{record.id}  {record.principal}", created + end_text(record.ends_at)]
        typer.echo("\n    ".join(map(printable, lines)))
    if not found:
        typer.echo(f"no tokens in {file}")


@app.command()
def revoke(
    file: TokensFile,
    token_id: Annotated[str, typer.Argument(metavar="ID", help="The token's id, as `kvpool token list` shows it.")],
) -> None:
    """Take a token out of a server's file, so that the server refuses it."""
    record = remove_record(file, token_id)
    typer.echo(
        f"revoked {record.id} of {record.principal}; a server that has this file refuses the token, and ends its calls "
        "under way, within 10 seconds"
    )


def _row(record: TokenRecord) -> dict[str, str | None]:
    principal, created_at = record.principal, record.created_at
    return {
        "id": record.id,
        "sha256": record.digest,
        "principal": str(principal),
        "tenant": principal.tenant if principal.role.has_tenant else None,
        "role": principal.role,
        "created_at": None if created_at is None else created_at.isoformat(),
        "ends_at": record.ends_at.isoformat(),
    }
