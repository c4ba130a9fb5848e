"""Two tenants with quotas in one pool: the settings and certificates of the example, with clients as engines."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import ByteSize, TypeAdapter

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.security.tls import TlsFiles
from tests.conftest import StartServer
from tests.support.processes import run_command
from tests.support.prometheus import ROOT
from tests.support.values import group_spec, namespace_spec, payload, run_of
from vllm_plugin.config import ConnectorConfig

EXAMPLE = ROOT / "examples" / "tenants"
SCALE = 1024
"""The test's memory and quotas are so much smaller than the example's."""
BLOCK_BYTES = 64 << 10


def _smaller(size: str) -> int:
    return int(TypeAdapter(ByteSize).validate_python(size)) // SCALE


def test_a_tenant_evicts_its_own_blocks_alone(
    pool_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kvpool = str(Path(sys.executable).with_name("kvpool"))
    made = run_command(kvpool, "certs", "init", "pki", "--host", "localhost", "--tenant", "acme", "--tenant", "umbra")
    assert made.returncode == 0, made.stderr
    text = (EXAMPLE / "server.toml").read_text()
    settings = tomllib.loads(text)
    quotas = {part.split("=")[0].removeprefix("tenant:"): _smaller(part.split("=")[1]) for part in settings["quota"]}
    assert sum(quotas.values()) <= _smaller(settings["memory"])
    for size in (settings["memory"], *(part.split("=")[1] for part in settings["quota"])):
        text = text.replace(f'"{size}"', f'"{_smaller(size)}"').replace(f'={size}"', f'={_smaller(size)}B"')
    for port in ("50051", "50052", "50053"):
        text = text.replace(f'"0.0.0.0:{port}"', '"127.0.0.1:0"')
    Path("server.toml").write_text(text)
    operator = TlsFiles.in_directory("pki/operator")
    flags = ("--config", "server.toml", "--memory", str(_smaller(settings["memory"])))
    server = pool_server(*flags, tls=operator)
    held = {}
    for tenant, model in (("umbra", "small"), ("acme", "large")):
        config = json.loads((EXAMPLE / f"{tenant}.json").read_text())["kv_connector_extra_config"]
        files = ConnectorConfig(**config).tls
        assert files is not None
        assert all(os.path.exists(path) for path in (files.ca, files.cert, files.key))
        client_config = ClientConfig(server.endpoint, timeout_ms=10_000, data_timeout_ms=10_000, tls=files)
        with Client(client_config) as client:
            namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES), model=model))
            room = quotas[tenant] // BLOCK_BYTES
            names = [f"{tenant}-{nth}" for nth in range(room + room // 2)]
            for start in range(0, len(names), 16):  # Half as much again as the tenant may hold.
                some = names[start : start + 16]
                client.put_blocks(namespace, run_of(*some), [payload(name, BLOCK_BYTES) for name in some])
            held[tenant] = sum(client.lookup(namespace, [run_of(name)]).hits[0].num_leading for name in names)
            assert 0 < held[tenant] <= room < len(names)
    with Client(ClientConfig(server.endpoint, timeout_ms=10_000, tls=operator)) as client:
        used = {quota.subject.removeprefix("tenant:"): quota.used_bytes for quota in client.admin.quotas()}
    assert used["umbra"] >= held["umbra"] * BLOCK_BYTES, "what acme stored has evicted nothing of umbra's"
