"""`kvpool certs`: certificates for those who have no authority of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpool.commands.common import AsJson, end_text, print_json
from kvpool.commands.option_bounds import within
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
    principals = _principals(tenant or [DEFAULT_TENANT], domain, operator=True)
    _issue(Authority.create(directory), host, principals, days)
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
    principals = _principals(tenant or [], domain, operator=operator)
    if not host and not principals:
        raise InvalidRequestError("nothing to make; give --host for a server, --tenant or --operator")
    _issue(Authority.load(directory), host or [], principals, days)


@app.command()
def show(
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


def _principals(tenants: list[str], domain: str, *, operator: bool) -> list[Principal]:
    of_no_tenant = [Principal(ALL_TENANTS, role, domain) for role in GLOBAL_ROLES] if operator else []
    return of_no_tenant + [Principal(tenant, role, domain) for tenant in tenants for role in TENANT_ROLES]


def _issue(authority: Authority, hosts: list[str], principals: list[Principal], days: int) -> None:
    made = [authority.issue_server_of(hosts, days)] if hosts else []
    made += [authority.issue_principal(principal, days) for principal in principals]
    for directory in made:
        (facts,) = read_certificates(directory / CERTIFICATE_NAME)
        typer.echo(printable(f"made {directory}/{{ca.crt,tls.crt,tls.key}} for {', '.join(facts.names)}"))
