"""The `mooncake` transport over real engines: this process's, and a kvpool-server's, over TCP on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool.client import Client
from kvpool.transport.mooncake import MooncakeTransport
from tests.contracts.transport_contract import Rig, ServerRegions, TransportContract
from tests.support.processes import ServerProcess

pytest.importorskip("mooncake.engine", reason="mooncake-transfer-engine is not installed", exc_type=ImportError)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, shm_dir: str) -> Iterator[ServerProcess]:
    server = ServerProcess(
        tmp_path_factory.mktemp("mooncake"), shm_dir, "--memory", "64MiB", "--grace-ms", "100", "--mooncake", "tcp"
    )
    yield server
    server.stop()


@pytest.fixture
def rig(server: ServerProcess, connect) -> Iterator[Rig]:  # type: ignore[no-untyped-def]
    client: Client = connect(server, transport="mooncake")
    regions = ServerRegions(client)
    transport = regions.open(256).transport
    assert isinstance(transport, MooncakeTransport)
    yield Rig(transport, regions)
    regions.give_back()


class TestContract(TransportContract):
    @pytest.fixture
    def rig(self, rig: Rig) -> Rig:
        return rig
