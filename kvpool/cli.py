"""The `kvpool` command: inspects and operates a running server."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import string
import sys
import time
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kvpool.bandwidth import (
    HIT_TOKENS,
    check_permission,
    hit_cost,
    largest_group,
    measure,
    measurement_config,
    shards_of_rank,
    usual_block,
)
from kvpool.bandwidth_report import row_of, text_of
from kvpool.certificates import CA_NAME, CERTIFICATE_NAME, KEY_NAME
from kvpool.client import Client
from kvpool.config import DEFAULT_ENDPOINT, TRANSPORTS, ClientConfig
from kvpool.errors import InvalidRequestError, KVPoolError, PermissionDeniedError, PoolTimeoutError
from kvpool.holdings import NamespaceInfo, duration_text, printable
from kvpool.namespace import Difference, differences
from kvpool.option_bounds import within
from kvpool.principal import Role
from kvpool.quotas import beyond_memory, parse_quota, size_text
from kvpool.tls import TlsFiles
from kvpool.types import HASH_BYTES, PoolStats, Quota, TierStats
from kvpool.version import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Inspect and operate a running kvpool-server.",
)
QUIET_S = 5.0
"""After this long without a message `kvpool events` asks for messages that may have been lost."""

CLEAR_TIMEOUT_MS = 20_000
"""`kvpool clear` waits for tiers, too."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Trust:
    """The options that stand before the command."""

    tls: Path | None
    token_file: str
    insecure_network: bool


_TRUST: ContextVar[_Trust] = ContextVar("options of all commands")

Endpoint = Annotated[str, typer.Option(envvar="KVPOOL_ENDPOINT", help="HOST:PORT or unix:PATH of the server.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def ping(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    transport: Annotated[str, typer.Option(help=f"Transport to try: {', '.join(TRANSPORTS)}.")] = "auto",
    bandwidth: Annotated[
        bool,
        typer.Option(
            "--bandwidth",
            help="Measure puts and gets, with blocks that are removed afterwards. With TLS this needs the role "
            f"{Role.OPERATOR}, also on an engine's host.",
        ),
    ] = False,
    mib: Annotated[
        int, typer.Option(callback=within(1, 65_536), help="MiB that a round of --bandwidth stores and loads.")
    ] = 256,
    namespace: Annotated[
        str | None,
        typer.Option(
            help=f"With --bandwidth: measure with this namespace's blocks, and say what a hit of {HIT_TOKENS:,} tokens "
            "costs. Fingerprint, or its first characters, as `kvpool namespaces` shows it."
        ),
    ] = None,
    tensor_parallel: Annotated[
        int,
        typer.Option(
            callback=within(1), help="With --namespace: the engine's ranks, each of which loads a share of a hit."
        ),
    ] = 1,
    prefill: Annotated[
        float | None,
        typer.Option(
            callback=within(1),
            help="With --namespace: tokens that the engine prefills a second; says what a hit saves.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that the server answers, and which transport a client gets; with --bandwidth, how fast it is."""
    if namespace is None and (prefill is not None or tensor_parallel != 1):
        raise InvalidRequestError("--prefill and --tensor-parallel are about a namespace's hits; give --namespace")
    if namespace is not None and not bandwidth:
        raise InvalidRequestError("--namespace needs a measurement; give --bandwidth")
    config = _trusting(measurement_config(endpoint, transport)) if bandwidth else _config(endpoint, transport)
    with Client(config) as client:
        if bandwidth:
            check_permission(client)
        version, uptime_s = client.admin.ping()
        choice = client.admin.try_transport()
        choice.transport.close()
        found = {"version": version, "endpoint": endpoint, "uptime_s": uptime_s}
        found |= {"transport": choice.transport.name, "route": choice.route, "why": choice.why}
        if not as_json:
            typer.echo(f"kvpool-server {version} at {endpoint}, up for {uptime_s:.0f} s")
            # The route of a fallback has a reason, which `why` has, too.
            route = f"{choice.transport.name} (slow)" if choice.is_fallback else choice.route
            typer.echo(f"bytes would travel by {route}: {choice.why}")
        if bandwidth:
            chosen = None if namespace is None else _info(client, namespace)
            if chosen is None:
                measured, cost = measure(client, mib << 20, usual_block(client)), None
            else:
                block = largest_group(chosen.spec, tensor_parallel)
                measured = measure(client, mib << 20, block, shards_of_rank(block, tensor_parallel))
                cost = hit_cost(measured, chosen, tensor_parallel)
            found |= row_of(measured, cost, prefill)
            if not as_json:
                typer.echo(text_of(measured, cost, prefill))
    if as_json:
        typer.echo(json.dumps(found, indent=2))


@app.command()
def whoami(endpoint: Endpoint = DEFAULT_ENDPOINT, as_json: AsJson = False) -> None:
    """Show who the server takes you for, what you may call, and when your certificate or token ends."""
    with _client(endpoint) as client:
        found = client.admin.whoami()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
        return
    typer.echo(printable(found.principal) or f"{endpoint} does not authenticate callers")
    if found.ends_at:
        left = duration_text(found.ends_at - time.time())
        typer.echo(f"    until {time.strftime('%Y-%m-%d %H:%M', time.gmtime(found.ends_at))} UTC, for {left}")
    typer.echo(f"    may call {', '.join(map(printable, found.methods))}")


@app.command()
def stats(endpoint: Endpoint = DEFAULT_ENDPOINT, as_json: AsJson = False) -> None:
    """Show what the pool holds and has done, under the names of its metrics."""
    with _client(endpoint) as client:
        snapshot = client.admin.stats()
    tiers = [_metrics(tier) for tier in snapshot.tiers]
    pool = {**_metrics(snapshot), "tiers": tiers}
    if as_json:
        typer.echo(json.dumps(pool, indent=2))
        return
    table = _metrics_table(f"kvpool-server at {endpoint}", pool)
    if snapshot.counters.get("lookup_blocks"):
        ratio = snapshot.counters.get("lookup_hits", 0) / snapshot.counters["lookup_blocks"]
        table.add_row("lookup hit ratio", f"{ratio:.1%}")
    Console().print(table)
    for tier in tiers:
        tier["up"] = "yes" if tier["up"] else "no: the tier failed, and is not called for a while"
        Console().print(_metrics_table(escape(f"tier {tier.pop('name')}"), tier))


def _metrics(stats: PoolStats | TierStats) -> dict[str, Any]:
    """A snapshot by the names of the server's Prometheus metrics, without kvpool_, kvpool_tier_ and _total."""
    return {name.removeprefix("num_"): value for name, value in dataclasses.asdict(stats).items()}


def _metrics_table(title: str, metrics: dict[str, Any]) -> Table:
    table = Table("metric", "value", title=title)
    values = {name: value for name, value in metrics.items() if name not in ("counters", "tiers")}
    for name, value in (*values.items(), *sorted(metrics["counters"].items())):
        table.add_row(name, escape(value) if isinstance(value, str) else f"{value:,}")
    return table


@app.command()
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
    """A namespace as a line with its fingerprint and model, and lines of facts."""
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
    return "\n    ".join(map(printable, lines))  # Engines choose the names of models and tenants.


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
    # Rich would read text in brackets as markup, and engines choose the names of hosts and models.
    columns = [Column(escape(f"{each.hex()[:12]}, {known[each].opened}"), overflow="fold") for each in (a, b)]
    table = Table("field", *columns, title=f"differences between two namespaces at {endpoint}")
    for field, ours, theirs in rows:
        table.add_row(
            escape(field), *(escape(value if isinstance(value, str) else json.dumps(value)) for value in (ours, theirs))
        )
    Console().print(table)


def _values(difference: Difference) -> tuple[str, Any, Any]:
    """A field and its two values. Of secrets the server sends digests."""
    return difference.field, difference.ours, difference.theirs


@app.command()
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
    for text, each in zip(quotas or (), wanted, strict=True):
        if each.limit_bytes and text.strip()[-1].isdigit():  # Most who forget the unit would evict nearly all.
            raise InvalidRequestError(f"quota {text!r} has no unit; give {text}GiB, or {text}B if you mean bytes")
    with _client(endpoint) as client:
        found = client.admin.set_quotas(wanted) if wanted else client.admin.quotas()
        warning = _beyond_memory(client, found)
    if warning:
        typer.echo(f"kvpool: {warning}", err=True)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(quota) for quota in found], indent=2))
        return
    if not found:
        typer.echo(f"no quotas at {endpoint}: every tenant and namespace may fill the arena")
        return
    table = Table("subject", "limit", "used", "share used", title=f"quotas at {endpoint}")
    for each in found:
        share = f"{each.used_bytes / each.limit_bytes:.0%}"
        table.add_row(escape(each.subject), size_text(each.limit_bytes), size_text(each.used_bytes), share)
    Console().print(table)


def _beyond_memory(client: Client, quotas: Sequence[Quota]) -> str:
    """As `beyond_memory`; empty for a tenant's operator, to whom the server tells neither its memory nor all quotas."""
    try:
        return beyond_memory(quotas, client.admin.stats().arena_bytes) if quotas else ""
    except PermissionDeniedError:
        return ""


@app.command(context_settings={"allow_extra_args": True})  # To name the option that is missing.
def clear(
    context: typer.Context,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    namespace: Annotated[
        str | None,
        typer.Option(help="Fingerprint, or its first characters, as `kvpool namespaces` shows it."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Drop the blocks of every namespace.")] = False,
) -> None:
    """Drop every block of one namespace, or of all."""
    if context.args:
        name = context.args[0]
        raise InvalidRequestError(f"{name!r} names nothing to drop; give --namespace {name}, or --all")
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
        str,
        typer.Option(help="The server's --kv-events-replay: begin with a snapshot, and recover lost messages."),
    ] = "",
    key: Annotated[
        Path | None, typer.Option(help="This subscriber's NAME.key_secret, if the server has --kv-events-key.")
    ] = None,
    server_key: Annotated[Path | None, typer.Option(help="With --key: the server's public NAME.key.")] = None,
    seconds: Annotated[float, typer.Option(help="Stop after this many seconds; 0: never.")] = 0.0,
) -> None:
    """Print the KV events that a server publishes: one message per line, as JSON."""
    from kvpool.curve import SubscriberKeys
    from kvpool.events import Subscriber

    if (key is None) != (server_key is None):
        raise InvalidRequestError("--key and --server-key belong together; give both, or neither")
    keys = None if key is None or server_key is None else SubscriberKeys.read(key, server_key)
    ends_at = time.monotonic() + seconds if seconds else float("inf")
    missed, heard, waiting = 0, False, False
    with Subscriber(endpoint, replay, keys=keys) as subscriber:
        typer.echo(f"kvpool: following {endpoint}; a server publishes only when blocks change", err=True)
        while (remaining_s := ends_at - time.monotonic()) > 0:
            try:
                messages = subscriber.receive(timeout_ms=int(1_000 * min(remaining_s, QUIET_S)))
            except PoolTimeoutError as error:
                if not heard:
                    raise
                if not waiting:
                    typer.echo(f"kvpool: {error}; the server may have stopped; still waiting", err=True)
                waiting = True
                continue
            heard, waiting = True, False
            for message in messages:
                shown = dataclasses.asdict(message)
                del shown["nbytes"]
                typer.echo(json.dumps(shown, default=_shown))
            if subscriber.missed > missed:
                typer.echo(f"kvpool: missed {subscriber.missed - missed} messages; --replay recovers them", err=True)
                missed = subscriber.missed


def _shown(value: object) -> str:
    """What JSON has no form for: hashes in hexadecimal."""
    return value.hex() if isinstance(value, bytes) else repr(value)


def _resolve(client: Client, prefix: str) -> bytes:
    if not prefix:
        raise InvalidRequestError("--namespace is empty; give a fingerprint, or --all for every namespace")
    fingerprints = [info.fingerprint for info in client.admin.namespaces(holdings=False)]
    if len(prefix) == 2 * HASH_BYTES and not prefix.strip(string.hexdigits):
        return bytes.fromhex(prefix)  # After a restart only a tier may know the namespace.
    return _one_of(fingerprints, prefix)


def _info(client: Client, prefix: str) -> NamespaceInfo:
    known = {info.fingerprint: info for info in client.admin.namespaces(holdings=False)}
    return known[_one_of(list(known), prefix)]


def _one_of(fingerprints: Sequence[bytes], prefix: str) -> bytes:
    matching = [fingerprint for fingerprint in fingerprints if fingerprint.hex().startswith(prefix.lower())]
    if len(matching) != 1:
        how_many = f"{len(matching)} namespaces begin" if matching else "no namespace begins"
        raise InvalidRequestError(f"{how_many} with {prefix!r}; `kvpool namespaces` lists them")
    return matching[0]


def _client(endpoint: str, transport: str = "auto") -> Client:
    return Client(_config(endpoint, transport))


def _config(endpoint: str, transport: str) -> ClientConfig:
    return _trusting(ClientConfig(endpoint=endpoint, transport=transport, timeout_ms=5_000))


def _trusting(config: ClientConfig) -> ClientConfig:
    """A configuration with the options that stand before the command."""
    trust = _TRUST.get()
    files = None if trust.tls is None else TlsFiles.in_directory(trust.tls)
    return dataclasses.replace(config, tls=files, token_file=trust.token_file, insecure_network=trust.insecure_network)


@app.callback(invoke_without_command=True)
def _common(
    tls: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            envvar="KVPOOL_TLS",
            help=f"Directory with {CA_NAME}, {CERTIFICATE_NAME} and {KEY_NAME}, as `kvpool certs` makes them; for "
            f"--token-file {CA_NAME} is enough.",
        ),
    ] = None,
    token_file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            envvar="KVPOOL_TOKEN_FILE",
            help="File with a bearer token, as `kvpool token create` makes it; with --tls.",
        ),
    ] = "",
    insecure_network: Annotated[
        bool,
        typer.Option(
            "--insecure-network",
            envvar="KVPOOL_INSECURE_NETWORK",
            help="Without --tls: talk to other hosts in plaintext, on a network where all are trusted.",
        ),
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"kvpool {__version__}")
        raise typer.Exit
    _TRUST.set(_Trust(tls, token_file, insecure_network))


def main() -> None:
    """Entry point of the console script. Prints errors as one sentence."""
    for point in importlib.metadata.entry_points(group="kvpool.commands"):
        # Loaded on demand: the commands of other packages import more than most users need.
        if sys.argv[1:2] in ([], ["--help"], [point.name]):
            loaded = point.load()
            if isinstance(loaded, typer.Typer):
                app.add_typer(loaded, name=point.name)
            else:
                app.command(point.name)(loaded)
    try:
        app()
    except KVPoolError as error:
        typer.echo(f"kvpool: {error}", err=True)
        raise SystemExit(1) from None
