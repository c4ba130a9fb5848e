"""The `kvpool` command: questions and orders to a running server."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvpool.client import Client
from kvpool.config import DEFAULT_ENDPOINT, TRANSPORTS, ClientConfig
from kvpool.errors import InvalidRequestError, KVPoolError, PoolTimeoutError
from kvpool.version import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Talk to a running kvpool-server.",
)
QUIET_S = 5.0
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
        version, uptime_s = client.ping()
        typer.echo(f"kvpool-server {version} at {endpoint}, up for {uptime_s:.0f} s")
        choice = client.try_transport()
        typer.echo(f"bytes would travel by {choice.transport.name}: {choice.why}")
        choice.transport.close()


@app.command()
def stats(endpoint: Endpoint = DEFAULT_ENDPOINT, as_json: AsJson = False) -> None:
    """What the pool holds and has done."""
    with _client(endpoint) as client:
        found = dataclasses.asdict(client.stats())
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
def namespaces(endpoint: Endpoint = DEFAULT_ENDPOINT, as_json: AsJson = False) -> None:
    """Which models' blocks the pool holds."""
    with _client(endpoint) as client:
        found = client.namespaces()
    if as_json:
        rows = [
            {"fingerprint": spec.fingerprint().hex(), "entries": entries, "bytes": nbytes, **dataclasses.asdict(spec)}
            for spec, entries, nbytes in found
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    headings = ("fingerprint", "model", "KV dtype", "groups (block tokens)", "tenant", "blocks", "bytes")
    table = Table(*headings, title=f"namespaces at {endpoint}")
    for spec, entries, nbytes in found:
        groups = ", ".join(f"{group.kind} ({group.block_tokens})" for group in spec.groups)
        identity = (spec.fingerprint().hex()[:12], spec.model, spec.kv_cache_dtype, groups, spec.tenant)
        table.add_row(*identity, f"{entries:,}", f"{nbytes:,}")
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
        typer.echo(f"dropped {client.clear(fingerprint):,} blocks of {whose} at {endpoint}")


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
    fingerprints = [spec.fingerprint() for spec, _, _ in client.namespaces()]
    matching = [fingerprint for fingerprint in fingerprints if fingerprint.hex().startswith(prefix.lower())]
    if len(matching) != 1:
        raise InvalidRequestError(
            f"namespace {prefix!r} names {len(matching)} of {len(fingerprints)} namespaces, not 1; "
            "`kvpool namespaces` lists them"
        )
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
