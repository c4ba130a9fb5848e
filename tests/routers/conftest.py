"""Servers that routers follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.protocol.namespace import NamespaceSpec
from tests.support.routers import RoutedServer

Start = Callable[[NamespaceSpec, int], list[RoutedServer]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers of one namespace: `start(spec, 2)`."""
    servers: list[RoutedServer] = []

    def make(spec: NamespaceSpec, count: int) -> list[RoutedServer]:
        servers.extend(RoutedServer(tmp_path, spec) for _ in range(count))
        return servers

    yield make
    for server in servers:
        server.close()
