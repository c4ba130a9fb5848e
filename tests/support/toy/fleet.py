"""Toy engines that share a pool, and the check that nothing is left when they are done."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.v1 import pool_pb2 as pb
from tests.support.held import held_by
from tests.support.processes import ServerProcess
from tests.support.toy.engine import ToyEngine
from tests.support.toy.fixtures import MakeConfig

_salts = itertools.count()
MakeToy = Callable[..., ToyEngine]


class Fleet:
    """Engines of one namespace on one server."""

    def __init__(self, make: MakeToy, config: MakeConfig, endpoint: str):
        self.make = make
        self._config = config
        self._salt = f"fleet {next(_salts)}"
        self.endpoint = endpoint

    def start(self, role: str = "kv_both", extra: dict[str, Any] | None = None, **toy: Any) -> ToyEngine:
        return self.make(self.config(role, extra, **toy.pop("options", {})), **toy)

    def config(self, role: str = "kv_both", extra: dict[str, Any] | None = None, **options: Any) -> VllmConfig:
        """Of an engine that shares with those of the fleet."""
        # On a busy machine a store is slow, and what waits for room to be pinned may not be stored at all.
        patient = {"lookup_timeout_ms": 5_000, "decline_slow_loads": False, "max_pinned_fraction": 1.0}
        extra = {**patient, "salt": self._salt, **(extra or {})}
        return self._config(self.endpoint, role=role, extra=extra, **options)


def stats_of(server: ServerProcess) -> pb.StatsResponse:
    with Client(ClientConfig(server.endpoint, timeout_ms=5_000)) as client:
        return client.admin.stats()


def assert_nothing_is_left(engine: ToyEngine) -> None:
    """No pin, no ledger entry, no block in use, and an own cache that can be emptied."""
    kept = held_by(engine.connector)
    assert not any(kept.values()), kept
    assert not engine.connector.has_pinned_blocks()
    assert engine.num_used_blocks() == 0
    assert engine.scheduler.reset_prefix_cache()
