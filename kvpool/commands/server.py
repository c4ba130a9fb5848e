"""Commands at one server: `kvpool ping` (does it answer, and how fast), `whoami`, `drain` and `events`."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.client.client import Client
from kvpool.client.config import DEFAULT_ENDPOINT, TRANSPORTS
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint, find_namespaces, within
from kvpool.protocol.errors import InvalidRequestError, PoolTimeoutError, UnavailableError
from kvpool.protocol.messages import fields_of
from kvpool.protocol.text import duration_text, size_text
from kvpool.protocol.types import MAX_DRAIN_MS
from kvpool.protocol.wire import decode_spec
from kvpool.report.bandwidth import HIT_TOKENS, TIMEOUTS, hit_bytes, hit_cost, measure, shards_of_rank, usual_block
from kvpool.report.output import seconds_text
from kvpool.security.principal import Role
from kvpool.v1 import pool_pb2 as pb

ROUND_MIB = 256
ASK_EVERY_S = 0.2
"""How often `drain --wait` asks how far the drain is."""
LATE_S = 10.0
"""How long after the deadline of the drain --wait goes on: the server closes its tiers then."""
QUIET_S = 5.0
"""After this long without a message `kvpool events` asks for messages that may have been lost."""


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
                typer.echo(measurement_text(found))
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


def measurement_text(found: dict[str, Any]) -> str:
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


def drain(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    deadline: Annotated[
        float | None,
        typer.Option(
            callback=within(0.001, MAX_DRAIN_MS / 1000),
            help="Seconds until the server stops, whatever is unfinished then. Default: the server's drain_ms. Of "
            "several drains the earliest deadline counts.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when the server answers no more; for preStop hooks.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Take the server out of service: no new lookups and puts, finish, write what tiers lack, stop.

    Ends with 1 if the server has not stopped 10 seconds after the deadline (--wait).
    """
    started = time.monotonic()
    with common.client_of(endpoint) as client:
        progress = client.admin.drain(0 if deadline is None else max(1, round(deadline * 1000)))
        if wait:
            progress = _wait_for_end(client, progress)
    seconds = time.monotonic() - started
    if as_json:
        common.print_json(fields_of(progress) | {"endpoint": endpoint, "stopped": wait, "seconds": round(seconds, 3)})
    elif wait:
        typer.echo(f"kvpool-server at {endpoint} has drained and stopped within {seconds:.1f} s")
        if progress.num_leases or progress.num_tickets or progress.num_queued_blocks:
            typer.echo(f"when it was last asked, there were {_progress_text(progress)}")
    else:
        typer.echo(
            f"kvpool-server at {endpoint} drains: {_progress_text(progress)}; it stops within "
            f"{progress.remaining_ms / 1000:.1f} s"
        )


def _wait_for_end(client: Client, progress: pb.DrainResponse) -> pb.DrainResponse:
    """Asks until the server answers no more; returns what it said last. Raises PoolTimeoutError if it goes on."""
    ends_at = time.monotonic() + progress.remaining_ms / 1000 + LATE_S
    while time.monotonic() < ends_at:
        time.sleep(ASK_EVERY_S)
        try:
            progress = client.admin.drain(boot_token=progress.boot_token)
        except PoolTimeoutError:
            continue  # It is busy, or on its way out.
        except UnavailableError:
            return progress
    raise PoolTimeoutError(
        f"kvpool-server at {client.config.endpoint} still answers {LATE_S:.0f} s after the deadline of its drain, with "
        f"{_progress_text(progress)}; see its log, and stop it with SIGTERM"
    )


def _progress_text(progress: pb.DrainResponse) -> str:
    return (
        f"{progress.num_leases} leases and {progress.num_tickets} tickets of clients, and "
        f"{progress.num_queued_blocks} blocks to be written to tiers"
    )


def events(
    endpoint: Annotated[str, typer.Argument(help="The server's --kv-events, for example tcp://127.0.0.1:5557.")],
    replay: Annotated[
        str, typer.Option(help="The server's --kv-events-replay: begin with a snapshot, and recover lost messages.")
    ] = "",
    key: Annotated[
        Path | None, typer.Option(help="This subscriber's NAME.key_secret, if the server has --kv-events-key.")
    ] = None,
    server_key: Annotated[Path | None, typer.Option(help="With --key: the server's public NAME.key.")] = None,
    seconds: Annotated[float, typer.Option(help="Stop after this many seconds; 0: never.")] = 0.0,
) -> None:
    """Print the KV events that a server publishes: one message per line, as JSON."""
    from kvpool.client.events import Subscriber
    from kvpool.security.curve import SubscriberKeys

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
                typer.echo(json.dumps(shown, default=_as_text))
            if subscriber.missed > missed:
                typer.echo(f"kvpool: missed {subscriber.missed - missed} messages; --replay recovers them", err=True)
                missed = subscriber.missed


def _as_text(value: object) -> str:
    """What JSON has no form for: hashes in hexadecimal."""
    return value.hex() if isinstance(value, bytes) else repr(value)
