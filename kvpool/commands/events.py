"""`kvpool events`: follows the KV events that a server publishes."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated

import typer

from kvpool.protocol.errors import InvalidRequestError, PoolTimeoutError

QUIET_S = 5.0
"""After this long without a message `kvpool events` asks for messages that may have been lost."""


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
                typer.echo(json.dumps(shown, default=_shown))
            if subscriber.missed > missed:
                typer.echo(f"kvpool: missed {subscriber.missed - missed} messages; --replay recovers them", err=True)
                missed = subscriber.missed


def _shown(value: object) -> str:
    """What JSON has no form for: hashes in hexadecimal."""
    return value.hex() if isinstance(value, bytes) else repr(value)
