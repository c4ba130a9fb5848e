"""`kvpool certs`: certificates for those who have no authority of their own."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Annotated

import typer

from kvpool.commands.option_bounds import within
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.text import duration_text, printable
from kvpool.security.certificates import (
    CA_DAYS,
    CERTIFICATE_NAME,
    LEAF_DAYS,
    Authority,
    CertificateFacts,
    host_names,
    read_certificates,
)
from kvpool.security.principal import ABOUT_DOMAINS, ALL_TENANTS, DEFAULT_DOMAIN, GLOBAL_ROLES, TENANT_ROLES, Principal

DEFAULT_TENANT = "default"

app = typer.Typer(no_args_is_help=True, help="Make and read certificates of servers, engines and operators.")

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


@app.command()
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
    principals = [*_of_no_tenant(domain), *_of_tenants(tenant or [DEFAULT_TENANT], domain)]
    made = _issue(Authority.create(directory), host, principals, days)
    _print_made(made)
    typer.echo(f"keep {directory}/ca/ca.key away from servers and engines: whoever has it can be anyone")


@app.command()
def issue(
    directory: Directory,
    host: Hosts = None,
    tenant: Tenants = None,
    operator: Annotated[bool, typer.Option("--operator", help="Make those of the operator and of metrics.")] = False,
    domain: Domain = DEFAULT_DOMAIN,
    days: Days = LEAF_DAYS,
) -> None:
    """Make further certificates with the directory's authority, or new ones before the old ones end.

    A server whose first --host is not in DIR/server gets DIR/servers/HOST. A new certificate of a server keeps the
    names of the one that it replaces.
    """
    principals = [*(_of_no_tenant(domain) if operator else []), *_of_tenants(tenant or [], domain)]
    if not host and not principals:
        raise InvalidRequestError("nothing to make; give --host for a server, --tenant or --operator")
    _print_made(_issue(Authority.load(directory), host or [], principals, days))


@app.command()
def show(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="PEM files, or directories of them.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show certificates: for what and whom they are, and when they end."""
    found = [facts for path in paths for facts in read_certificates(path)]
    if as_json:
        rows = [{"files": f.paths, "use": f.use, "names": f.names, "ends_at": f.ends_at.isoformat()} for f in found]
        typer.echo(json.dumps(rows, indent=2))
        return
    for facts in found:
        typer.echo("\n    ".join(map(printable, _lines(facts))))
    if not found:
        typer.echo(f"no certificates in {', '.join(map(str, paths))}")


@app.command("events-key")
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


def _lines(facts: CertificateFacts) -> list[str]:
    left_s = (facts.ends_at - dt.datetime.now(dt.UTC)).total_seconds()
    when = f"in {duration_text(left_s)}" if left_s > 0 else f"{duration_text(-left_s)} ago"
    ends = f"{'ends' if left_s > 0 else 'ENDED'} {facts.ends_at:%Y-%m-%d %H:%M} UTC, {when}"
    return [f"{facts.use}: {', '.join(facts.names)}", ends, *facts.paths]


def _of_no_tenant(domain: str) -> list[Principal]:
    return [Principal(ALL_TENANTS, role, domain) for role in GLOBAL_ROLES]


def _of_tenants(tenants: list[str], domain: str) -> list[Principal]:
    return [Principal(tenant, role, domain) for tenant in tenants for role in TENANT_ROLES]


def _issue(authority: Authority, hosts: list[str], principals: list[Principal], days: int) -> list[Path]:
    made = [authority.issue_server_of(hosts, days)] if hosts else []
    return made + [authority.issue_principal(principal, days) for principal in principals]


def _print_made(directories: list[Path]) -> None:
    for directory in directories:
        (facts,) = read_certificates(directory / CERTIFICATE_NAME)
        typer.echo(printable(f"made {directory}/{{ca.crt,tls.crt,tls.key}} for {', '.join(facts.names)}"))
