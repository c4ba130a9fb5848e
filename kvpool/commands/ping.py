"""`kvpool ping`: whether a server answers, by which transport, and how fast."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.client.client import Client
from kvpool.client.config import DEFAULT_ENDPOINT, TRANSPORTS
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint, find_namespace
from kvpool.commands.option_bounds import within
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.text import duration_text
from kvpool.protocol.wire import decode_spec
from kvpool.report.bandwidth import (
    HIT_TOKENS,
    check_permission,
    hit_cost,
    largest_group,
    measure,
    measurement_config,
    shards_of_rank,
    usual_block,
)
from kvpool.report.bandwidth_report import row_of, text_of
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
    measuring = common.trusting(measurement_config(endpoint, transport)) if bandwidth else None
    with Client(measuring or common.config_of(endpoint, transport)) as client:
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
        }
        found |= {"transport": choice.transport.name, "route": choice.route, "why": choice.why}
        if not as_json:
            typer.echo(f"kvpool-server {pong.version} at {endpoint}, up for {duration_text(pong.uptime_seconds)}")
            if pong.draining:
                typer.echo("the server drains: it takes no new lookups and puts, and stops soon")
            # The route of a fallback has a reason, which `why` has, too.
            route = f"{choice.transport.name} (slow)" if choice.is_fallback else choice.route
            typer.echo(f"bytes would travel by {route}: {choice.why}")
        if bandwidth:
            round_bytes = (mib or ROUND_MIB) << 20
            chosen = None if namespace is None else find_namespace(client, namespace)
            if chosen is None:
                measured, cost = measure(client, round_bytes, usual_block(client)), None
            else:
                block = largest_group(decode_spec(chosen.spec), tensor_parallel)
                measured = measure(client, round_bytes, block, shards_of_rank(block, tensor_parallel))
                cost = hit_cost(measured, chosen, tensor_parallel)
            found |= row_of(measured, cost, prefill)
            if not as_json:
                typer.echo(text_of(measured, cost, prefill))
    if as_json:
        common.print_json(found)
