"""`kvpool drain`: takes a server out of service."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvpool.client.client import Client
from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint, within
from kvpool.protocol.errors import PoolTimeoutError, UnavailableError
from kvpool.protocol.messages import fields_of
from kvpool.protocol.types import MAX_DRAIN_MS
from kvpool.v1 import pool_pb2 as pb

ASK_EVERY_S = 0.2
"""How often --wait asks how far the drain is."""
LATE_S = 10.0
"""How long after the deadline of the drain --wait goes on: the server closes its tiers then."""


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
            progress = _wait(client, progress)
    seconds = time.monotonic() - started
    if as_json:
        common.print_json(fields_of(progress) | {"endpoint": endpoint, "stopped": wait, "seconds": round(seconds, 3)})
    elif wait:
        typer.echo(f"kvpool-server at {endpoint} has drained and stopped within {seconds:.1f} s")
        if progress.num_leases or progress.num_tickets or progress.num_queued_blocks:
            typer.echo(f"when it was last asked, there were {_in_words(progress)}")
    else:
        typer.echo(
            f"kvpool-server at {endpoint} drains: {_in_words(progress)}; it stops within "
            f"{progress.remaining_ms / 1000:.1f} s"
        )


def _wait(client: Client, progress: pb.DrainResponse) -> pb.DrainResponse:
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
        f"{_in_words(progress)}; see its log, and stop it with SIGTERM"
    )


def _in_words(progress: pb.DrainResponse) -> str:
    return (
        f"{progress.num_leases} leases and {progress.num_tickets} tickets of clients, and "
        f"{progress.num_queued_blocks} blocks to be written to tiers"
    )
