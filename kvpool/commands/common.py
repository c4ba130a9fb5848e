"""What the commands of `kvpool` share: options, the client, output and exit statuses.

Commands call `common.client_of`, by this module, so that a test can give all of them another client.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import ConfigError, InvalidRequestError
from kvpool.protocol.text import duration_text
from kvpool.security.tls import TlsFiles
from kvpool.v1 import pool_pb2 as pb

TIMEOUT_MS = 5_000
"""Deadline of each call of a command."""
SLOW_TIMEOUT_MS = 20_000
"""Deadline of calls that wait for tiers, or send the block names of a long prompt."""

Endpoint = Annotated[str, typer.Option(envvar="KVPOOL_ENDPOINT", help="HOST:PORT or unix:PATH of the server.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class ExitStatus(IntEnum):
    """Statuses with which commands end."""

    OK = 0
    PROBLEM = 1
    """The server refused or could not be reached, or the command found an error."""
    USAGE = 2
    """The command line is wrong."""


@dataclass(frozen=True, slots=True)
class Trust:
    """The options of all commands: how a client and its server know each other."""

    tls: Path | None = None
    token_file: str = ""
    insecure_network: bool = False


TRUST: ContextVar[Trust] = ContextVar("options of all commands")


def client_of(endpoint: str) -> Client:
    """A client of the server at `endpoint`, with the options of all commands."""
    return Client(config_of(endpoint))


def config_of(endpoint: str, transport: str = "auto", **fields: int) -> ClientConfig:
    """The configuration of `client_of`; `fields` are others of a `ClientConfig`."""
    trust = TRUST.get()
    try:
        tls = None if trust.tls is None else TlsFiles.in_directory(trust.tls)
    except ConfigError as error:
        raise ConfigError(f"--tls {error}") from None
    own: dict[str, Any] = {"token_file": trust.token_file, "insecure_network": trust.insecure_network, **fields}
    return ClientConfig(endpoint, transport, TIMEOUT_MS, tls=tls, **own)


def within(least: float, most: float | None = None, instead: str = "") -> Callable[[float | None], float | None]:
    """A callback of `typer.Option` that refuses what is out of bounds, and names `instead`, such as "or --end".

    Typer's own `min` and `max` do not say which value was given.
    """

    def check(value: float | None) -> float | None:
        if value is None or (least <= value and (most is None or value <= most)):
            return value
        bounds = f"{least:,} or more" if most is None else f"{least:,} to {most:,}"
        raise typer.BadParameter(f"{value} is out of bounds; give {bounds}{instead and f', {instead}'}")

    return check


def print_json(value: Any) -> None:
    """Prints a value as indented JSON."""
    typer.echo(json.dumps(value, indent=2))


def minute_text(moment: dt.datetime) -> str:
    """A time to the minute, UTC."""
    return f"{moment.astimezone(dt.UTC):%Y-%m-%d %H:%M} UTC"


def end_text(ends_at: dt.datetime) -> str:
    """When a certificate or token ends, or has ended."""
    left_s = (ends_at - dt.datetime.now(dt.UTC)).total_seconds()
    if left_s > 0:
        return f"ends {minute_text(ends_at)}, in {duration_text(left_s)}"
    return f"ENDED {minute_text(ends_at)}, {duration_text(-left_s)} ago"


def find_namespaces(client: Client, *prefixes: str) -> list[pb.NamespaceInfo]:
    """For each prefix the one open namespace whose fingerprint begins with it. Raises InvalidRequestError."""
    known = client.admin.namespaces(holdings=False)
    found = []
    for prefix in prefixes:
        matching = [info for info in known if info.fingerprint.hex().startswith(prefix.lower())]
        if len(matching) != 1:
            how_many = f"{len(matching)} namespaces begin" if matching else "no namespace begins"
            raise InvalidRequestError(f"{how_many} with {prefix!r}; `kvpool namespaces` lists them")
        found += matching
    return found
