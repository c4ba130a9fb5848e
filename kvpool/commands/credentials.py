"""`kvpool certs`, `token` and `name-key`: files of credentials. These commands call no server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpool.commands.common import AsJson, end_text, minute_text, print_json, within
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.text import printable
from kvpool.security.certificates import (
    CA_DAYS,
    CERTIFICATE_NAME,
    LEAF_DAYS,
    Authority,
    host_names,
    read_certificates,
)
from kvpool.security.files import write_whole
from kvpool.security.name_key import NameKey
from kvpool.security.principal import (
    ABOUT_DOMAINS,
    ALL_TENANTS,
    DEFAULT_DOMAIN,
    GLOBAL_ROLES,
    TENANT_ROLES,
    Principal,
    Role,
)
from kvpool.security.tokens import TokenRecord, append_record, create_token, parse_lifetime, read_records, remove_record

DEFAULT_TENANT = "default"

certs = typer.Typer(no_args_is_help=True, help="Make and read certificates of servers, engines and operators.")
token = typer.Typer(no_args_is_help=True, help="Make, list and revoke bearer tokens, of callers without a certificate.")
name_key = typer.Typer(no_args_is_help=True, help="Make and compare keys by which the engines of a tenant name blocks.")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the authority and its certificates.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", help="DNS name or address by which clients reach the server. Repeat for several."),
]
Tenants = Annotated[list[str] | None, typer.Option("--tenant", help="Make this tenant's certificates. Repeatable.")]
Domain = Annotated[
    str, typer.Option(help=f"{ABOUT_DOMAINS} Servers take certificates of one domain alone (--trust-domain).")
]
Days = Annotated[int, typer.Option(callback=within(1, CA_DAYS - 1), help="Days for which the certificates are valid.")]
TokensFile = Annotated[Path, typer.Argument(metavar="FILE", help="The server's file of tokens (--tokens).")]
KeyFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="File of the key (name_key_file of engines and clients).")
]


@certs.command()
def init(
    directory: Directory,
    host: Hosts = None,
    tenant: Tenants = None,
    domain: Domain = DEFAULT_DOMAIN,
    days: Days = LEAF_DAYS,
) -> None:
    """Make an authority, a server's certificate, and one certificate for each tenant and role."""
    if not host:
        raise InvalidRequestError("no --host; give the DNS names or addresses by which engines reach the server")
    host_names(host)  # Before anything is written.
    principals = _principals(tenant or [DEFAULT_TENANT], domain, operator=True)
    _issue(Authority.create(directory), host, principals, days)
    typer.echo(f"keep {directory}/ca/ca.key away from servers and engines: whoever has it can be anyone")


@certs.command()
def issue(
    directory: Directory,
    host: Hosts = None,
    tenant: Tenants = None,
    operator: Annotated[
        bool,
        typer.Option(
            "--operator", help="Make those of the operator, of metrics and of servers that read from one another."
        ),
    ] = False,
    domain: Domain = DEFAULT_DOMAIN,
    days: Days = LEAF_DAYS,
) -> None:
    """Make further certificates with the directory's authority, or new ones before the old ones end.

    A server whose first --host is not in DIR/server gets DIR/servers/HOST. A new certificate of a server keeps the
    names of the one that it replaces.
    """
    principals = _principals(tenant or [], domain, operator=operator)
    if not host and not principals:
        raise InvalidRequestError("nothing to make; give --host for a server, --tenant or --operator")
    _issue(Authority.load(directory), host or [], principals, days)


def _principals(tenants: list[str], domain: str, *, operator: bool) -> list[Principal]:
    of_no_tenant = [Principal(ALL_TENANTS, role, domain) for role in GLOBAL_ROLES] if operator else []
    return of_no_tenant + [Principal(tenant, role, domain) for tenant in tenants for role in TENANT_ROLES]


def _issue(authority: Authority, hosts: list[str], principals: list[Principal], days: int) -> None:
    made = [authority.issue_server_of(hosts, days)] if hosts else []
    made += [authority.issue_principal(principal, days) for principal in principals]
    for directory in made:
        (facts,) = read_certificates(directory / CERTIFICATE_NAME)
        typer.echo(printable(f"made {directory}/{{ca.crt,tls.crt,tls.key}} for {', '.join(facts.names)}"))


@certs.command("show")
def show_certificates(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="PEM files, or directories of them.")],
    as_json: AsJson = False,
) -> None:
    """Show certificates: for what and whom they are, and when they end."""
    found = [facts for path in paths for facts in read_certificates(path)]
    if as_json:
        rows = [{"files": f.paths, "use": f.use, "names": f.names, "ends_at": f.ends_at.isoformat()} for f in found]
        print_json(rows)
        return
    for facts in found:
        lines = [f"{facts.use}: {', '.join(facts.names)}", end_text(facts.ends_at), *facts.paths]
        typer.echo("\n    ".join(map(printable, lines)))
    if not found:
        typer.echo(f"no certificates in {', '.join(map(str, paths))}")


@certs.command()
def events_key(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="Makes NAME.key (public) and NAME.key_secret.")],
    subscribers: Annotated[
        Path | None, typer.Option("--list", help="The server's list (--kv-events-subscribers), which gets the key.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="With --list: the subscriber sees this tenant's events.")] = "",
    operator: Annotated[bool, typer.Option("--operator", help="With --list: it sees all tenants' events.")] = False,
) -> None:
    """Make a CURVE key pair, of a server's KV events or of one that subscribes to them."""
    from kvpool.security import curve

    if subscribers is None and (tenant or operator):
        raise InvalidRequestError("--tenant and --operator stand in the server's list of subscribers; give --list")
    if subscribers is not None and bool(tenant) == operator:
        raise InvalidRequestError("--list says whose events the key may see; give either --tenant or --operator")
    if tenant:
        Principal(tenant, TENANT_ROLES[0])  # Raises for an impossible name before a file is made.
    public = curve.create_pair(name).public
    if subscribers is not None:
        curve.append_subscriber(subscribers, tenant or ALL_TENANTS, public)
    typer.echo(f"made {name}{{{curve.PUBLIC_SUFFIX},{curve.SECRET_SUFFIX}}}, public key {public.decode()}")


@token.command("create")
def create_token_of(
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
    text, record = create_token(Principal(tenant or ALL_TENANTS, role, domain), parse_lifetime(expires))
    append_record(file, record)
    if out is None:
        typer.echo(text)
    else:
        write_whole(out, f"{text}\n".encode(), secret=True)
    typer.echo(f"kvpool: {record.principal} until {minute_text(record.ends_at)}; nobody can print it again", err=True)


@token.command("list")
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


@token.command()
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


@name_key.command("create")
def create_name_key(file: KeyFile) -> None:
    """Make a key in a new file that only its owner can read. Give all engines that share blocks a copy."""
    typer.echo(f"made {file}, key {NameKey.create(file).digest}; keep it away from servers")


@name_key.command("show")
def show_name_key(file: KeyFile) -> None:
    """Print the digest of a key, by which `kvpool namespaces` and the engines' logs name it."""
    typer.echo(NameKey.read(file).digest)
