"""Two tenants with quotas in one pool: the settings and certificates of the example, with clients as engines."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import ByteSize, TypeAdapter

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.text import parse_quota
from kvpool.security.tls import TlsFiles
from tests.conftest import StartServer
from tests.support.processes import run_command
from tests.support.prometheus import ROOT
from tests.support.values import namespace_spec, payload, run_of
from vllm_plugin.config import ConnectorConfig

EXAMPLE = ROOT / "examples" / "tenants"


def test_the_examples_settings_serve_its_tenants(
    pool_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kvpool = str(Path(sys.executable).with_name("kvpool"))
    made = run_command(kvpool, "certs", "init", "pki", "--host", "localhost", "--tenant", "acme", "--tenant", "umbra")
    assert made.returncode == 0, made.stderr
    text = (EXAMPLE / "server.toml").read_text()
    settings = tomllib.loads(text)
    quotas = [parse_quota(each) for each in settings["quota"]]
    assert sum(quota.limit_bytes for quota in quotas) <= TypeAdapter(ByteSize).validate_python(settings["memory"])
    for port in ("50051", "50052", "50053"):
        text = text.replace(f'"0.0.0.0:{port}"', '"127.0.0.1:0"')
    Path("server.toml").write_text(text)
    operator = TlsFiles.in_directory("pki/operator")
    server = pool_server("--config", "server.toml", "--memory", "64MiB", tls=operator)
    for tenant in ("umbra", "acme"):
        config = json.loads((EXAMPLE / f"{tenant}.json").read_text())["kv_connector_extra_config"]
        files = ConnectorConfig(**config).tls
        with Client(ClientConfig(server.endpoint, timeout_ms=10_000, data_timeout_ms=10_000, tls=files)) as client:
            namespace = client.open_namespace(namespace_spec(model=tenant))
            client.put_blocks(namespace, run_of("a"), [payload("a", 256)])
            assert client.lookup(namespace, [run_of("a")]).hits[0].num_leading == 1
    with Client(ClientConfig(server.endpoint, timeout_ms=10_000, tls=operator)) as client:
        used = {quota.subject: quota.limit_bytes for quota in client.admin.quotas() if quota.used_bytes}
    assert used == {quota.subject: quota.limit_bytes for quota in quotas}
