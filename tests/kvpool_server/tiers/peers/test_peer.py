"""One other server: what this server keeps of it, and for how long."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing

import pytest
from structlog.testing import capture_logs

from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import UnavailableError
from kvpool.transport.shm import ShmTransport
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.tiers.peers import tier
from kvpool_server.tiers.peers.peer import Peer
from tests.contracts.tier_contract import awaited, opened
from tests.kvpool_server.tiers.peers.conftest import CHUNK, SPEC, Host, StartServer
from tests.support.memory_files import mapped_bytes
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import block_hash, payload


def test_the_memory_of_a_dead_server_of_this_host_is_let_go_and_that_of_the_next_is_read(
    pool_server: StartServer,
) -> None:
    """The next server may be waiting for the memory, and nobody asks for a block meanwhile."""
    server, namespace, names = pool_server(), PoolNamespace(SPEC, SPEC.fingerprint()), [block_hash("a")]

    def read() -> int:
        """Stores a block and reads it; returns the file of the memory that it lies in."""
        with closing(Host(server)) as host:
            host.put("a")
            leased, found = peer.find(namespace.groups[0], names, lease=True), bytearray(CHUNK)
            assert leased is not None and isinstance(leased.namespace.transport, ShmTransport)
            peer.read(leased, names, [memoryview(found)])
            peer.release(leased.lease_id)
            assert found == payload("a", CHUNK).tobytes()
            return os.fstat(leased.namespace.transport.segment.fd).st_ino

    with closing(Peer(ClientConfig(server.endpoint, timeout_ms=5_000))) as peer:
        with closing(Host(server)) as host:
            host.put("old")
        inode = read()
        assert mapped_bytes(inode)
        server.kill()
        assert not _answers(peer)
        # A thread that has just read may keep its last view for a moment.
        wait_for(lambda: not mapped_bytes(inode), "the memory is let go", 2)
        server = pool_server("--listen", server.endpoint)
        wait_for(lambda: _answers(peer), "the next server")
        assert read() != inode
        assert peer.find(namespace.groups[0], [block_hash("old")], lease=True) is None


@awaited
async def test_a_server_that_names_itself_is_told_once(
    shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "WATCH_S", 0.01)
    config = ClientConfig(shared_server.endpoint, timeout_ms=5_000)
    with closing(Peer(config)) as peer:
        boot_token = peer.ping()
    async with opened(tier.PeersTier("peers:x", config, [config.endpoint], own_boot_token=boot_token)) as itself:
        with capture_logs() as logs:
            while len(itself._own) < 1:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
    (line,) = logs
    assert line["log_level"] == "error" and "names this server as another one" in line["event"]


def _answers(peer: Peer) -> bool:
    try:
        return bool(peer.ping())
    except UnavailableError:
        return False
