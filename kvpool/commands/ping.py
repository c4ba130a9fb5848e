"""`kvpool ping` and `whoami`: whether a server answers, by which transport, how fast, and as whom it knows us."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvpool.client.client import Client
from kvpool.client.config import DEFAULT_ENDPOINT, TRANSPORTS
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint, find_namespaces
from kvpool.commands.option_bounds import within
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.messages import fields_of
from kvpool.protocol.text import duration_text
from kvpool.protocol.wire import decode_spec
from kvpool.report.bandwidth import (
    HIT_TOKENS,
    TIMEOUTS,
    Bandwidth,
    HitCost,
    Rates,
    check_permission,
    hit_cost,
    largest_group,
    measure,
    shards_of_rank,
    usual_block,
)
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
    given = {"--namespace": namespace, "--mib": mib}
    if needy := [name for name, value in given.items() if value is not None and not bandwidth]:
        raise InvalidRequestError(f"{needy[0]} needs a measurement; give --bandwidth, too")
    with Client(common.config_of(endpoint, transport, **(TIMEOUTS if bandwidth else {}))) as client:
        if bandwidth:
            check_permission(client)
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
            round_bytes = (mib or ROUND_MIB) << 20
            cost = None
            if namespace is None:
                measured = measure(client, round_bytes, usual_block(client))
            else:
                (chosen,) = find_namespaces(client, namespace)
                block = largest_group(decode_spec(chosen.spec), tensor_parallel)
                measured = measure(client, round_bytes, block, shards_of_rank(block, tensor_parallel))
                cost = hit_cost(measured, chosen, tensor_parallel)
            used = client.attachment.choice or choice
            found |= {"route": used.route, "why": used.why, **row_of(measured, cost, prefill)}
            if not as_json:
                typer.echo(text_of(measured, cost, prefill))
    if as_json:
        common.print_json(found)


def row_of(measured: Bandwidth, cost: HitCost | None, prefill: float | None) -> dict[str, Any]:
    """A measurement as JSON.

    Args:
        cost: of a namespace's hit, if one was asked for.
        prefill: tokens that the engine prefills a second; None: unknown.
    """
    row = asdict(measured)
    if cost is not None:
        row["hit"] = {"namespace": cost.fingerprint.hex(), "tokens": HIT_TOKENS, "bytes": cost.nbytes}
        row["hit"] |= {"load_ms": cost.load_s * 1e3, "pays_below_tokens_per_s": cost.break_even}
        if prefill is not None:
            compute_s = HIT_TOKENS / prefill
            row["hit"] |= {"compute_ms": compute_s * 1e3, "saved_ms": (compute_s - cost.load_s) * 1e3}
    return row


def text_of(measured: Bandwidth, cost: HitCost | None, prefill: float | None) -> str:
    """A measurement as lines of at most 80 characters; arguments as for `row_of`."""
    sizes = (measured.region_bytes, measured.put_round_bytes, measured.get_round_bytes)
    region, put, get = map(size_text, sizes)
    lines = [
        f"round trip  {seconds_text(measured.round_trip_ms / 1e3)}",
        f"one block   {seconds_text(measured.one_block_ms / 1e3)} to look up and load {region}",
        f"put         {_rates_text(measured.put_gb_per_s)}, {measured.rounds} rounds of {put}",
        f"get         {_rates_text(measured.get_gb_per_s)}, {measured.rounds} rounds of {get}",
    ]
    if measured.transport == "shm":
        lines.append("CPU threads copy here; an engine on a GPU lets the device copy, faster.")
    if measured.limited_by == "time":
        lines.append("The pool is slow from here: rounds were made small enough for about a second.")
    if measured.limited_by == "room":
        lines.append(f"Rounds were made small: the pool has only {size_text(measured.free_bytes)} free.")
    if measured.evicted_blocks:
        lines.append(f"The pool evicted {measured.evicted_blocks:,} blocks meanwhile, for this or for engines.")
    if cost is not None:
        hit = f"A hit of {HIT_TOKENS:,} tokens of {cost.fingerprint.hex()[:12]}"
        lines.append(f"{hit} loads {size_text(cost.nbytes)} a rank in {seconds_text(cost.load_s)}.")
        lines.append(f"It pays where prefill is slower than {cost.break_even:,.0f} tokens/s.")
        if prefill is not None:
            compute_s = HIT_TOKENS / prefill
            verb = "saves" if compute_s > cost.load_s else "loses"
            difference = seconds_text(abs(compute_s - cost.load_s))
            computing = f"At {prefill:,.0f} tokens/s computing takes {seconds_text(compute_s)}"
            lines.append(f"{computing}: the hit {verb} {difference}.")
    return "\n".join(lines)


def _rates_text(rates: Rates) -> str:
    return f"{rates.median:.3g} GB/s ({rates.lowest:.3g} to {rates.highest:.3g})"


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
