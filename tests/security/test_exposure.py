"""What a server tells of its ports: which of them other hosts reach in plaintext, and how engines reach it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.channel import open_channel
from kvpool.client.client import Client
from kvpool.protocol.errors import ConfigError
from kvpool.security.certificates import Authority
from kvpool.security.principal import Principal, Role
from kvpool.security.tokens import append_record, create_token
from kvpool_server.app.command import _kv_transfer_config
from kvpool_server.settings.config import ServerConfig
from kvpool_server.settings.exposure import plaintext_ports, tls_files
from tests.conftest import StartServer
from tests.support.certificates import DAY, files_in, server_flags
from tests.support.processes import run_command, server_command
from tests.support.values import namespace_spec
from vllm_plugin.config import ConnectorConfig

ENGINE = Principal("acme", Role.ENGINE_WRITE)
TLS = {"tls_cert": "x", "tls_key": "x", "tls_client_ca": "x"}


@pytest.mark.parametrize(
    ("settings", "plaintext"),
    [
        ({}, []),
        ({"listen": "0.0.0.0:1"}, ["--listen"]),
        ({"listen": "192.0.2.1:1"}, ["--listen"]),
        ({"listen": "pool.example:1"}, ["--listen"]),
        ({"listen": "127.pool.example:1"}, ["--listen"]),
        ({"listen": "127.0.0.2:1", "http_listen": "[::1]:1", "data_listen": "localhost:1"}, []),
        ({"http_listen": "[::]:1", "data_listen": "192.0.2.1:1"}, ["--http-listen", "--data-listen"]),
        ({"listen": "0.0.0.0:1", "http_listen": "0.0.0.0:1", "data_listen": "0.0.0.0:1", **TLS}, []),
        ({"kv_events": "tcp://192.0.2.1:1", "kv_events_replay": "ipc://x", **TLS}, ["KV events"]),
        ({"mooncake": "tcp", **TLS}, []),
    ],
)
def test_which_ports_other_hosts_reach_in_plaintext(settings: dict[str, Any], plaintext: list[str]) -> None:
    """So a server warns if and only if there is one, whether or not it has TLS elsewhere."""
    for insecure_network in (False, True):
        config = ServerConfig(insecure_network=insecure_network, **settings)
        found = plaintext_ports(config)
        assert len(found) == len(plaintext) and all(map(str.startswith, found, plaintext))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "--trust-domain corp.example has no effect without TLS"),
        ({"tls_cert": "x", "tls_key": "x", "tokens": "x"}, "--trust-domain corp.example restricts certificates alone"),
        (
            {"tls_cert": "x", "tls_key": "x", "oidc_issuer": "https://x", "oidc_audience": "x"},
            "--trust-domain corp.example restricts certificates alone",
        ),
    ],
)
def test_a_trust_domain_that_would_restrict_nobody_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        tls_files(ServerConfig(trust_domain="corp.example", **settings))
    tls_files(ServerConfig(**settings))
    tls_files(ServerConfig(trust_domain="corp.example", **TLS))


@pytest.mark.parametrize("flag", ["--tls-client-ca", "--tokens", "--oidc-jwks", "--deny"])
def test_a_file_that_decides_who_may_call_is_writable_by_its_owner_alone(tmp_path: Path, flag: str) -> None:
    directory = Authority.create(tmp_path / "pki").issue_server([])
    with_certificates, file = server_flags(directory), tmp_path / "file"
    own = with_certificates[:4]
    flags = {
        "--tls-client-ca": own,
        "--tokens": own,
        "--oidc-jwks": [*own, "--oidc-issuer", "https://x", "--oidc-audience", "x"],
    }.get(flag, with_certificates)
    file.write_bytes((directory / "ca.crt").read_bytes() if flag == "--tls-client-ca" else b"")
    file.chmod(0o664)
    done = run_command(*server_command("--listen", "127.0.0.1:0", "--http-listen", "", *flags, flag, str(file)))
    assert done.returncode == 2
    assert f"{file} can be written by its group or others (mode 0664), who could" in done.stderr
    assert f"; chmod go-w {file}" in done.stderr


@pytest.mark.parametrize("proof", ["certificates", "tokens"])
def test_the_printed_connector_settings_work(pool_server: StartServer, tmp_path: Path, proof: str) -> None:
    authority = Authority.create(tmp_path / "pki")
    directory = authority.issue_principal(ENGINE)
    flags = server_flags(authority.issue_server([]))
    files: dict[str, Any] = {"tls": files_in(directory)}
    if proof == "tokens":
        token, record = create_token(ENGINE, DAY)
        append_record(tmp_path / "known", record)
        (directory / "token").write_text(token)
        (directory / "token").chmod(0o600)
        flags = [*flags[:4], "--tokens", str(tmp_path / "known")]
        files["token_file"] = str(directory / "token")
    server = pool_server(*flags, **files)
    printed = server.stdout[server.stdout.index("'{") + 1 : server.stdout.rindex("}'") + 1]
    settings = json.loads(printed.replace("DIR", str(directory)).replace("TENANT", "acme"))
    connector = ConnectorConfig.parse(settings["kv_connector_extra_config"])
    with Client(connector.client_config()) as client:
        assert client.open_namespace(namespace_spec(tenant=connector.tenant)).fingerprint


def test_connector_settings_for_a_plaintext_server_of_another_host() -> None:
    settings = ServerConfig(listen="0.0.0.0:1", insecure_network=True)
    extra = _kv_transfer_config(settings, "pool.example:50051")["kv_connector_extra_config"]
    open_channel(ConnectorConfig.parse(extra).client_config()).close()
    del extra["insecure_network"]
    with pytest.raises(ConfigError):
        open_channel(ConnectorConfig.parse(extra).client_config())
    for endpoint in ("127.0.0.1:50051", "unix:/run/kvpool.sock"):
        assert _kv_transfer_config(ServerConfig(), endpoint)["kv_connector_extra_config"] == {"endpoint": endpoint}
