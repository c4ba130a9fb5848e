"""`kvpool-server --record`; `tests/benchmarks` reads and replays what the recorder writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from tests.conftest import StartServer
from tests.support.values import namespace_spec, payload, run_of


def test_a_server_records_each_lookup_and_put_once(pool_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "recording"
    server = pool_server("--record", str(path))
    with Client(ClientConfig(server.endpoint)) as client:
        namespace = client.open_namespace(namespace_spec(tenant="acme"))
        client.put_blocks(namespace, run_of("a", "b"), [payload(name, 256) for name in "ab"])
        client.release([client.lookup(namespace, [run_of("a", "b", "c")]).lease_id])
    server.terminate()
    server.wait()
    first, described, put, lookup = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    assert first["kvpool_recording"] == 1 and "tenant" not in described
    assert len(put["put"]) == 2 * 16
    assert lookup["lookup"].startswith(put["put"]) and len(lookup["lookup"]) == 3 * 16 and lookup["hits"] == 2
