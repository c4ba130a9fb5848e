"""Real servers with an engine each, and a real directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.types import BlockRun
from kvpool.v1 import pool_pb2 as pb
from tests.support.directory import DirectoryProcess
from tests.support.processes import ServerProcess
from tests.support.values import block_hash, group_spec, namespace_spec, payload

StartServer = Callable[..., ServerProcess]
CHUNK = 4_096
SPEC = namespace_spec(group_spec(chunk_bytes=CHUNK), tenant="acme")
LONG = 256
"""Blocks of a prefix of which some are announced."""
DEADLINE_S = 20.0


class Host:
    """A server and an engine of its host."""

    def __init__(self, server: ServerProcess, **identity: Any):
        self.server = server
        self.client = Client(ClientConfig(server.endpoint, timeout_ms=10_000, **identity))
        self.namespace = self.client.open_namespace(SPEC)

    def put(self, *names: object) -> None:
        blocks = [payload(name, CHUNK) for name in names]
        self.client.put_blocks(self.namespace, BlockRun(0, [block_hash(name) for name in names]), blocks)

    def load(self, *names: object) -> list[bool]:
        """Looks up until nothing is on its way; which blocks came, whose bytes are checked."""
        run = BlockRun(0, [block_hash(name) for name in names])
        ends_at = time.monotonic() + DEADLINE_S
        while (found := self.client.lookup(self.namespace, [run], prefix_only=False)).retry_after_ms:
            assert time.monotonic() < ends_at, "blocks are on their way for ever"
            self.client.rpc.release_quietly(found.lease_id)
            time.sleep(found.retry_after_ms / 1000)
        if not found.lease_id:
            return [False] * len(names)
        blocks = self.client.get_blocks(self.namespace, found.lease_id, run)
        for name, block in zip(names, blocks, strict=True):
            assert block is None or np.array_equal(block, payload(name, CHUNK)), f"wrong bytes of {name}"
        self.client.release([found.lease_id])
        return [block is not None for block in blocks]

    def seconds_of_a_miss(self, name: str) -> float:
        began = time.monotonic()
        assert not any(self.load(*(f"{name}-{nth}" for nth in range(LONG))))
        return time.monotonic() - began

    @property
    def tier(self) -> pb.TierStats:
        (tier,) = self.client.admin.stats().tiers
        return tier

    @property
    def read_bytes(self) -> int:
        return int(self.tier.counters["read_bytes"])

    @property
    def servers(self) -> dict[str, tuple[bool, int]]:
        """Of the tier: whether each answers, and what was read from it."""
        return {each.name: (each.up, each.read_bytes) for each in self.tier.servers}

    def explain(self, *names: object) -> pb.ExplainResponse:
        run = BlockRun(0, [block_hash(name) for name in names])
        return self.client.admin.explain(self.namespace.fingerprint, [run], timeout_ms=10_000)

    @property
    def looked_up(self) -> int:
        return int(self.client.admin.stats().counters["lookup_blocks"])

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def host(pool_server: StartServer) -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def start(*flags: str) -> Host:
        hosts.append(Host(pool_server("--memory", "64MiB", *flags)))
        return hosts[-1]

    yield start
    for each in hosts:
        each.close()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DirectoryProcess]:
    process = DirectoryProcess(tmp_path)
    yield process
    process.kill()


@pytest.fixture
def by_directory(directory: DirectoryProcess, tmp_path: Path) -> tuple[str, str]:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(os.urandom(32).hex())
    return "--tier", f"peers:transport=tcp,directory={directory.url},key_file={key}"
