"""Servers that routers follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.namespace import NamespaceSpec
from tests.support.routers import RoutedServer

Start = Callable[..., list[RoutedServer]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers of one namespace: `start(spec, 2)`, or `start(spec, 2, has_replays=False)`."""
    servers: list[RoutedServer] = []

    def make(spec: NamespaceSpec, count: int, has_replays: bool = True) -> list[RoutedServer]:
        servers.extend(RoutedServer(tmp_path, f"pool-{nth}", spec, has_replays=has_replays) for nth in range(count))
        return servers

    yield make
    for server in servers:
        server.close()
