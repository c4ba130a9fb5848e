"""The client in TypeScript: built from the lock file and the proto, against a real server, beside the one in Python."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.hashing import checksum
from kvpool.protocol.types import PoolKey
from tests.conftest import StartServer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "node"

pytestmark = [
    pytest.mark.skipif(shutil.which("npm") is None, reason="no Node: apt-get install nodejs npm"),
]


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's program, built in a copy of the repository's two folders that it needs."""
    copy = tmp_path_factory.mktemp("repository")
    without = shutil.ignore_patterns("node_modules", "dist", "generated")
    shutil.copytree(EXAMPLE, copy / "examples" / "node", ignore=without)
    shutil.copytree(ROOT / "proto", copy / "proto")
    for command in (["npm", "ci", "--no-audit", "--no-fund"], ["npm", "run", "build"]):
        ran = subprocess.run(
            command, cwd=copy / "examples" / "node", capture_output=True, text=True, timeout=240, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    return copy / "examples" / "node" / "dist" / "tour.js"


def _run(tour: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    command = ["node", str(tour), endpoint]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_what_node_stores_node_and_python_load(tour: Path, pool_server: StartServer) -> None:
    server = pool_server("--memory", "64MiB")
    ran = _run(tour, server.endpoint)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    expected = {"before": 0, "stored": 2, "after": 2, "equal": [True, True], "misses": 1}
    assert {key: told[key] for key in expected} == expected
    assert told["checksum"] == str(checksum(bytes([7]) * 65_536))
    with Client(ClientConfig(server.endpoint, timeout_ms=10_000)) as client:
        key = PoolKey(bytes.fromhex(told["fingerprint"]), 0, hashlib.sha256(b"second").digest(), 0)
        (chunk,) = client.chunks.get([key])
    assert chunk is not None and bytes(chunk.payload) == bytes([7]) * 65_536


def test_a_server_that_is_not_there_is_an_error(tour: Path) -> None:
    ran = _run(tour, "127.0.0.1:1")
    assert ran.returncode != 0 and "UNAVAILABLE" in ran.stderr
