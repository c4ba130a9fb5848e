"""Namespaces as operators name them: by the first characters of their fingerprints."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.client.client import Client
from kvpool.protocol.errors import InvalidRequestError
from kvpool.v1 import pool_pb2 as pb


def find_namespace(client: Client, prefix: str) -> pb.NamespaceInfo:
    """The one open namespace whose fingerprint begins with `prefix`. Raises InvalidRequestError."""
    known = {info.fingerprint: info for info in client.admin.namespaces(holdings=False)}
    return known[one_of(list(known), prefix)]


def one_of(fingerprints: Sequence[bytes], prefix: str) -> bytes:
    """The one fingerprint that begins with the hexadecimal `prefix`. Raises InvalidRequestError."""
    matching = [fingerprint for fingerprint in fingerprints if fingerprint.hex().startswith(prefix.lower())]
    if len(matching) != 1:
        how_many = f"{len(matching)} namespaces begin" if matching else "no namespace begins"
        raise InvalidRequestError(f"{how_many} with {prefix!r}; `kvpool namespaces` lists them")
    return matching[0]
