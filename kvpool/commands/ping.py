"""`kvpool ping` and `whoami`: whether a server answers, by which transport, how fast, and as whom it knows us."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

import typer

from kvpool.client.client import Client
from kvpool.client.config import DEFAULT_ENDPOINT, TRANSPORTS
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint, find_namespaces, within
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.messages import fields_of
from kvpool.protocol.text import duration_text
from kvpool.protocol.wire import decode_spec
from kvpool.report.bandwidth import HIT_TOKENS, TIMEOUTS, hit_bytes, hit_cost, measure, shards_of_rank, usual_block
from kvpool.report.output import seconds_text
from kvpool.report.quotas import size_text
from kvpool.security.principal import Role

ROUND_MIB = 256


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
        int | None,
        typer.Option(
            callback=within(1, 65_536),
            help=f"With --bandwidth: MiB that a round stores and loads (default: {ROUND_MIB}).",
        ),
    ] = None,
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
    if not bandwidth and (namespace is not None or mib is not None):
        raise InvalidRequestError("--mib and --namespace are about a measurement; give --bandwidth, too")
    with Client(common.config_of(endpoint, transport, **(TIMEOUTS if bandwidth else {}))) as client:
        pong = client.admin.ping()
        choice = client.admin.try_transport()
        choice.transport.close()
        found = {
            "version": pong.version,
            "endpoint": endpoint,
            "uptime_s": pong.uptime_seconds,
            "draining": pong.draining,
            "transport": choice.transport.name,
            "route": choice.route,
            "why": choice.why,
        }
        if not as_json:
            typer.echo(f"kvpool-server {pong.version} at {endpoint}, up for {duration_text(pong.uptime_seconds)}")
            if pong.draining:
                typer.echo("the server drains: it takes no new lookups and puts, and stops soon")
            # The route of a fallback has a reason, which `why` has, too.
            route = f"{choice.transport.name} (slow)" if choice.is_fallback else choice.route
            typer.echo(f"bytes would travel by {route}: {choice.why}")
        if bandwidth:
            found |= _measured(client, (mib or ROUND_MIB) << 20, namespace, tensor_parallel, prefill)
            used = client.attachment.choice or choice
            found |= {"route": used.route, "why": used.why}
            if not as_json:
                typer.echo(text_of(found))
    if as_json:
        common.print_json(found)


def _measured(
    client: Client, round_bytes: int, prefix: str | None, tp_size: int, prefill: float | None
) -> dict[str, Any]:
    """A measurement with usual blocks, or with those of the namespace whose fingerprint begins with `prefix`."""
    client.admin.stats()  # The server refuses others than operators here, and names the role.
    if prefix is None:
        return measure(client, round_bytes, usual_block(client))
    (info,) = find_namespaces(client, prefix)
    block = max(decode_spec(info.spec).groups, key=lambda group: hit_bytes(group, tp_size))
    measured = measure(client, round_bytes, block, shards_of_rank(block, tp_size))
    return measured | {"hit": hit_cost(measured, info, tp_size, prefill)}


def text_of(found: dict[str, Any]) -> str:
    """A measurement, as `measure` returns it, as lines of at most 80 characters."""
    region, put, get, free = (
        size_text(found[name]) for name in ("region_bytes", "put_round_bytes", "get_round_bytes", "free_bytes")
    )
    lines = [
        f"round trip  {seconds_text(found['round_trip_ms'] / 1e3)}",
        f"one block   {seconds_text(found['one_block_ms'] / 1e3)} to look up and load {region}",
        f"put         {_rates_text(found['put_gb_per_s'])}, {found['rounds']} rounds of {put}",
        f"get         {_rates_text(found['get_gb_per_s'])}, {found['rounds']} rounds of {get}",
    ]
    if found["transport"] == "shm":
        lines.append("CPU threads copy here; an engine on a GPU lets the device copy, faster.")
    if found["limited_by"] == "time":
        lines.append("The pool is slow from here: rounds were made small enough for about a second.")
    if found["limited_by"] == "room":
        lines.append(f"Rounds were made small: the pool has only {free} free.")
    if found["evicted_blocks"]:
        lines.append(f"The pool evicted {found['evicted_blocks']:,} blocks meanwhile, for this or for engines.")
    if hit := found.get("hit"):
        load = seconds_text(hit["load_ms"] / 1e3)
        which = f"A hit of {HIT_TOKENS:,} tokens of {hit['namespace'][:12]}"
        lines.append(f"{which} loads {size_text(hit['bytes'])} a rank in {load}.")
        lines.append(f"It pays where prefill is slower than {hit['pays_below_tokens_per_s']:,.0f} tokens/s.")
        if "saved_ms" in hit:
            verb = "saves" if hit["saved_ms"] > 0 else "loses"
            computing, difference = (seconds_text(abs(hit[name]) / 1e3) for name in ("compute_ms", "saved_ms"))
            rate = HIT_TOKENS / hit["compute_ms"] * 1e3
            lines.append(f"At {rate:,.0f} tokens/s computing takes {computing}: the hit {verb} {difference}.")
    return "\n".join(lines)


def _rates_text(rates: dict[str, float]) -> str:
    return f"{rates['median']:.3g} GB/s ({rates['lowest']:.3g} to {rates['highest']:.3g})"


def whoami(endpoint: Endpoint = DEFAULT_ENDPOINT, as_json: AsJson = False) -> None:
    """Show who the server takes you for, what you may call, and when your certificate or token ends."""
    with common.client_of(endpoint) as client:
        found = client.admin.whoami()
    if as_json:
        common.print_json(fields_of(found))
        return
    typer.echo(found.principal or f"{endpoint} does not authenticate callers")
    if found.ends_at:
        typer.echo(f"    {common.end_text(dt.datetime.fromtimestamp(found.ends_at, dt.UTC))}")
    typer.echo(f"    may call {', '.join(found.methods)}")
