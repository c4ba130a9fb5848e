"""`kvpool clear`: drops the blocks of one namespace, or of all."""

from __future__ import annotations

import string
from typing import Annotated

import typer

from kvpool.client.client import Client
from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import Endpoint, one_of
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.types import HASH_BYTES

CLEAR_TIMEOUT_MS = 20_000
"""`kvpool clear` waits for tiers, too."""


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
    with common.client_of(endpoint) as client:
        fingerprint = b"" if namespace is None else _fingerprint(client, namespace)
        whose = "all namespaces" if namespace is None else f"namespace {fingerprint.hex()[:12]}"
        typer.echo(
            f"dropped {client.admin.clear(fingerprint, timeout_ms=CLEAR_TIMEOUT_MS):,} blocks of {whose} at {endpoint}"
        )


def _fingerprint(client: Client, prefix: str) -> bytes:
    if not prefix:
        raise InvalidRequestError("--namespace is empty; give a fingerprint, or --all for every namespace")
    fingerprints = [info.fingerprint for info in client.admin.namespaces(holdings=False)]
    if len(prefix) == 2 * HASH_BYTES and not prefix.strip(string.hexdigits):
        return bytes.fromhex(prefix)  # After a restart only a tier may know the namespace.
    return one_of(fingerprints, prefix)
