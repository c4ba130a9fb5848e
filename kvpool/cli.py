"""The `kvpool` command: questions and orders to a running server."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import string
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kvpool.client import Client
from kvpool.config import DEFAULT_ENDPOINT, TRANSPORTS, ClientConfig
from kvpool.errors import InvalidRequestError, KVPoolError, PoolTimeoutError
from kvpool.holdings import NamespaceInfo, duration_text, printable
from kvpool.namespace import Difference, differences
from kvpool.quotas import parse_quota, size_text
from kvpool.types import HASH_BYTES, Quota
from kvpool.version import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Talk to a running kvpool-server.",
)
QUIET_S = 5.0
CLEAR_TIMEOUT_MS = 20_000
"""Tiers are waited for, too."""
"""After so long without an event, one that was lost is asked for."""
Endpoint = Annotated[str, typer.Option(envvar="KVPOOL_ENDPOINT", help="HOST:PORT of the server.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def ping(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    transport: Annotated[str, typer.Option(help=f"Try this one: {', '.join(TRANSPORTS)}.")] = "auto",
) -> None:
    """Is the server there, and how would bytes travel?"""
    with _client(endpoint, transport) as client:
        version, uptime_s = client.admin.ping()
        typer.echo(f"kvpool-server {version} at {endpoint}, up for {uptime_s:.0f} s")
        choice = client.admin.try_transport()
        typer.echo(f"bytes would travel by {choice.route}: {choice.why}")
        choice.transport.close()


@app.command()
def stats(endpoint: Endpoint = DEFAULT_ENDPOINT, as_json: AsJson = False) -> None:
    """What the pool holds and has done."""
    with _client(endpoint) as client:
        found = dataclasses.asdict(client.admin.stats())
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    counters, tiers = found.pop("counters"), found.pop("tiers")
    table = Table("what", "value", title=f"kvpool-server at {endpoint}")
    for name, value in (*found.items(), *sorted(counters.items())):
        table.add_row(name, f"{value:,}")
    asked = counters.get("lookup_blocks", 0)
    if asked:
        table.add_row("hit ratio of lookups", f"{counters.get('lookup_hits', 0) / asked:.1%}")
    Console().print(table)
    for tier in tiers:
        counters = tier.pop("counters")
        table = Table("what", "value", title=f"tier {tier.pop('name')}")
        table.add_row("up", "yes" if tier.pop("up") else "no: it failed, and is left alone for a while")
        for name, value in (*tier.items(), *sorted(counters.items())):
            table.add_row(name, f"{value:,}")
        Console().print(table)


@app.command()
def namespaces(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Only print in which fields namespaces A and B differ (fingerprints, or their first characters).",
        ),
    ] = None,
) -> None:
    """Which models' blocks the pool holds; why two engines do not share."""
    if diff is not None:
        _print_differences(endpoint, diff, as_json)
        return
    with _client(endpoint) as client:
        found = client.admin.namespaces()
        bounds = client.admin.quotas()
    if as_json:
        typer.echo(json.dumps([_row(info, bounds) for info in found], indent=2))
        return
    typer.echo(f"at {endpoint}:" if found else f"no namespaces at {endpoint}")
    for info in found:
        typer.echo(_text(info, [quota for quota in bounds if _covers(quota, info)]))


def _text(info: NamespaceInfo, bounds: Sequence[Quota]) -> str:
    """Its fingerprint and model, and lines of what there is to say of it."""
    limits = "".join(f" of {size_text(quota.limit_bytes)}" for quota in bounds)
    facts = [f"{info.num_entries:,} blocks, {size_text(info.nbytes)}{limits}"]
    if info.hit_ratio is not None:
        facts.append(f"hits {info.hit_ratio:.1%}")
    if info.spec.tenant:
        facts.append(f"tenant {info.spec.tenant}")
    if info.superseded:
        facts.append("superseded")
    lines = [
        f"{info.fingerprint.hex()[:12]}  {info.spec.model}",
        "; ".join(facts),
        f"{info.opened}; last used {duration_text(info.idle_seconds)} ago",
        *(f"in {tier.tier}: {tier.num_entries:,} blocks, {size_text(tier.nbytes)}" for tier in info.tiers),
    ]
    return "\n    ".join(map(printable, lines))  # Models and tenants are called what their engines say.


def _row(info: NamespaceInfo, bounds: Sequence[Quota]) -> dict[str, Any]:
    row = dataclasses.asdict(info)
    spec, fingerprint = row.pop("spec"), row.pop("fingerprint").hex()
    shown = {"fingerprint": fingerprint, "entries": row.pop("num_entries"), "bytes": row.pop("nbytes"), **row}
    quotas = [dataclasses.asdict(quota) for quota in bounds if _covers(quota, info)]
    return {**shown, "hit_ratio": info.hit_ratio, "quotas": quotas, **spec}


def _covers(quota: Quota, info: NamespaceInfo) -> bool:
    return quota.covers(info.spec.tenant, info.fingerprint)


def _print_differences(endpoint: str, prefixes: tuple[str, str], as_json: bool) -> None:
    with _client(endpoint) as client:
        known = {info.fingerprint: info for info in client.admin.namespaces(holdings=False)}
        a, b = (_one_of(list(known), prefix) for prefix in prefixes)
    rows = [_values(difference) for difference in differences(known[a].spec, known[b].spec)]
    if as_json:
        typer.echo(json.dumps([{"field": field, "a": ours, "b": theirs} for field, ours, theirs in rows], indent=2))
        return
    if not rows:
        typer.echo(f"{a.hex()[:12]} and {b.hex()[:12]} at {endpoint} differ in no field")
        return
    columns = [Column(f"{each.hex()[:12]}, {known[each].opened}", overflow="fold") for each in (a, b)]
    table = Table("field", *columns, title=f"what two namespaces at {endpoint} differ in")
    for field, ours, theirs in rows:
        # Escaped: Rich takes what is in brackets for markup.
        table.add_row(
            escape(field), *(escape(value if isinstance(value, str) else json.dumps(value)) for value in (ours, theirs))
        )
    Console().print(table)


def _values(difference: Difference) -> tuple[str, Any, Any]:
    """A field and its two values; a tenant's own are not shown to others."""
    if difference.is_private:
        return difference.field, "(differs)", "(differs)"
    return difference.field, difference.ours, difference.theirs


@app.command()
def quota(
    quotas: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SUBJECT=SIZE]...",
            help="tenant:NAME=20GiB, or namespace:FINGERPRINT=20GiB, of which the first characters do; "
            "SUBJECT=0 takes a bound away. None: only list.",
        ),
    ] = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
) -> None:
    """Bound what tenants or namespaces hold of the arena; say what the bounds are. Lasts until the server stops."""
    wanted = [parse_quota(text) for text in quotas or ()]
    with _client(endpoint) as client:
        found = client.admin.set_quotas(wanted)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(quota) for quota in found], indent=2))
        return
    table = Table("subject", "limit", "used", "share used", title=f"quotas at {endpoint}")
    for each in found:
        share = f"{each.used_bytes / each.limit_bytes:.0%}"
        table.add_row(each.subject, size_text(each.limit_bytes), size_text(each.used_bytes), share)
    Console().print(table)


@app.command()
def clear(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    namespace: Annotated[
        str | None,
        typer.Option(help="Fingerprint, or its first characters, as `kvpool namespaces` shows it."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Of every namespace.")] = False,
) -> None:
    """Drop every block of a namespace, or of all."""
    if everything == (namespace is not None):
        raise InvalidRequestError("give either --namespace, or --all to drop the blocks of every model")
    with _client(endpoint) as client:
        fingerprint = b"" if namespace is None else _resolve(client, namespace)
        whose = "all namespaces" if namespace is None else f"namespace {fingerprint.hex()[:12]}"
        typer.echo(
            f"dropped {client.admin.clear(fingerprint, timeout_ms=CLEAR_TIMEOUT_MS):,} blocks of {whose} at {endpoint}"
        )


@app.command()
def events(
    endpoint: Annotated[str, typer.Argument(help="The server's --kv-events, for example tcp://127.0.0.1:5557.")],
    replay: Annotated[
        str, typer.Option(help="Its --kv-events-replay: begin with all that the pool holds, and miss nothing.")
    ] = "",
    seconds: Annotated[float, typer.Option(help="Stop after so long; 0: never.")] = 0.0,
) -> None:
    """Print the KV events that a server publishes, one message a line, as JSON."""
    from kvpool.events import Subscriber

    ends_at = time.monotonic() + seconds if seconds else float("inf")
    missed, heard, waiting = 0, False, False
    with Subscriber(endpoint, replay) as subscriber:
        typer.echo(f"kvpool: following {endpoint}; nothing comes while nothing happens, or nobody publishes", err=True)
        while (remaining_s := ends_at - time.monotonic()) > 0:
            try:
                messages = subscriber.receive(timeout_ms=int(1_000 * min(remaining_s, QUIET_S)))
            except PoolTimeoutError as error:
                if not heard:
                    raise
                if not waiting:
                    typer.echo(f"kvpool: {error}; has the server stopped? Waiting for it", err=True)
                waiting = True
                continue
            heard, waiting = True, False
            for message in messages:
                typer.echo(json.dumps(dataclasses.asdict(message), default=bytes.hex))
            if subscriber.missed > missed:
                typer.echo(f"kvpool: missed {subscriber.missed - missed} messages; --replay would get them", err=True)
                missed = subscriber.missed


def _resolve(client: Client, prefix: str) -> bytes:
    if not prefix:
        raise InvalidRequestError("--namespace is empty; give a fingerprint, or --all instead")
    fingerprints = [info.fingerprint for info in client.admin.namespaces(holdings=False)]
    if len(prefix) == 2 * HASH_BYTES and not prefix.strip(string.hexdigits):
        return bytes.fromhex(prefix)  # Maybe only a tier knows it, since a restart.
    return _one_of(fingerprints, prefix)


def _one_of(fingerprints: Sequence[bytes], prefix: str) -> bytes:
    matching = [fingerprint for fingerprint in fingerprints if fingerprint.hex().startswith(prefix.lower())]
    if len(matching) != 1:
        how_many = f"{len(matching)} namespaces begin" if matching else "no namespace begins"
        raise InvalidRequestError(f"{how_many} with {prefix!r}; `kvpool namespaces` lists them")
    return matching[0]


def _client(endpoint: str, transport: str = "auto") -> Client:
    return Client(ClientConfig(endpoint=endpoint, transport=transport, timeout_ms=5_000))


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"kvpool {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the console script: errors are sentences, not tracebacks."""
    for point in importlib.metadata.entry_points(group="kvpool.commands"):
        # Other packages' commands are loaded only for who wants them.
        if sys.argv[1:2] in ([], ["--help"], [point.name]):
            app.add_typer(point.load(), name=point.name)
    try:
        app()
    except KVPoolError as error:
        typer.echo(f"kvpool: {error}", err=True)
        raise SystemExit(1) from None
