"""What a server refuses to serve, which of its ports other hosts reach in plaintext, and how engines reach it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.channel import open_channel
from kvpool.client.client import Client
from kvpool.protocol.errors import ConfigError
from kvpool.security.certificates import Authority
from kvpool.security.principal import Principal, Role
from kvpool.security.tokens import append_record, create_token, read_records
from kvpool_server.access.authentication import DenyList
from kvpool_server.access.control import ServerCredentials
from kvpool_server.access.oidc import read_keys
from kvpool_server.app.command import _kv_transfer_config
from kvpool_server.settings.config import ServerConfig
from kvpool_server.settings.loading import check_exposure, plaintext_ports
from tests.conftest import StartServer
from tests.support.certificates import DAY, files_in, server_flags
from tests.support.values import namespace_spec
from vllm_plugin.config import ConnectorConfig

ENGINE = Principal("acme", Role.ENGINE_WRITE)
TLS = {"tls_cert": "x", "tls_key": "x", "tls_client_ca": "x"}
EVENT_KEYS = {"kv_events_key": "server.key_secret", "kv_events_subscribers": "subscribers"}
OWN = {"tls_cert": "x", "tls_key": "x"}
ISSUER = {"oidc_issuer": "https://x", "oidc_audience": "x"}
EVERYWHERE = {"listen": "0.0.0.0:1", "http_listen": "0.0.0.0:2", "data_listen": "0.0.0.0:3"}
EVENTS_EVERYWHERE = {
    "kv_events": "tcp://0.0.0.0:4",
    "kv_events_replay": "tcp://0.0.0.0:5",
    "kv_events_tenant": "acme=tcp://0.0.0.0:6,tcp://0.0.0.0:7",
}


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
        ({**EVERYWHERE, **TLS}, []),
        ({"kv_events": "tcp://192.0.2.1:1", "kv_events_replay": "ipc://x", **TLS}, ["KV events"]),
        ({"kv_events": "ipc://x", "kv_events_replay": "tcp://0.0.0.0:1"}, ["KV events"]),
        ({**EVERYWHERE, **EVENTS_EVERYWHERE, **TLS, **EVENT_KEYS}, []),
        ({"kv_events": "ipc:///run/kv", **TLS}, []),
    ],
)
def test_a_port_that_other_hosts_reach_in_plaintext_is_refused_and_told_where_an_operator_wants_it(
    settings: dict[str, Any], plaintext: list[str]
) -> None:
    found = plaintext_ports(ServerConfig(**settings))
    assert len(found) == len(plaintext) and all(map(str.startswith, found, plaintext))
    open_network = ServerConfig(insecure_network=True, **settings)
    assert plaintext_ports(open_network) == found
    check_exposure(open_network)
    with pytest.raises(ConfigError) if plaintext else nullcontext():
        check_exposure(ServerConfig(**settings))


DOMAIN = {"trust_domain": "corp.example"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"listen": "0.0.0.0:0"},
        r"--listen 0.0.0.0:0: other hosts .*--tls-client-ca \(or --tokens\), or give --insecure-",
    ),
    (EVENTS_EVERYWHERE, "KV events at tcp://0.0.0.0:4: other hosts can reach .*kvpool certs events-key"),
    ({"kv_events_tenant": "acme=ipc:///e,tcp://0.0.0.0:0"}, "KV events at tcp://0.0.0.0:0: other hosts"),
    ({**TLS, "kv_events": "tcp://127.0.0.1:3"}, "this port does not authenticate callers.*or give ipc://PATH"),
    ({"mooncake": "tcp"}, "--mooncake-trusted-network where only trusted hosts reach its ports, or --insecure"),
    ({**TLS, "tier": "mooncake:master=h:1"}, "--mooncake-trusted-network where only trusted hosts reach its"),
    ({"mooncake": "tcp", "listen": "0.0.0.0:1", "mooncake_trusted_network": True}, r"--listen 0\.0\.0\.0:1: other"),
    ({"tls_cert": "x"}, "TLS needs --tls-cert and --tls-key"),
    ({"tokens": "x"}, "TLS needs --tls-cert and --tls-key"),
    (OWN, "give either --tls-client-ca, for certificates, or --tokens"),
    ({**OWN, **ISSUER, "tokens": "x"}, "give either"),
    ({**OWN, "oidc_issuer": "https://x"}, "--oidc-audience"),
    ({**OWN, "oidc_issuer": "http://x", "oidc_audience": "x"}, "is not https://"),
    ({"limit": ["leases=5", "tickets=5"]}, "--limit leases=5 --limit tickets=5 has no effect without TLS"),
    ({"deny": "x"}, "--deny x has no effect without TLS"),
    (DOMAIN, "--trust-domain corp.example has no effect without TLS"),
    ({**DOMAIN, **OWN, "tokens": "x"}, "--trust-domain corp.example restricts certificates alone"),
    ({**DOMAIN, **OWN, **ISSUER}, "--trust-domain corp.example restricts certificates alone"),
    ({"kv_events": "ipc://x", "kv_events_key": "x"}, "need --kv-events-key and --kv-events-subscribers"),
    (EVENT_KEYS, "--kv-events-key protects nothing without events"),
]


@pytest.mark.parametrize(("settings", "told"), REFUSED)
def test_what_a_server_refuses_to_serve(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_exposure(ServerConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {**DOMAIN, **TLS},
        {**OWN, **ISSUER},
        {**OWN, "tokens": "x", "limit": ["leases=5"]},
        {**TLS, "kv_events": "tcp://127.0.0.1:3", **EVENT_KEYS},
        {**TLS, "kv_events": "tcp://127.0.0.1:3", "insecure_network": True},
        {"mooncake": "tcp", "mooncake_trusted_network": True},
    ],
)
def test_what_a_server_serves(settings: dict[str, Any]) -> None:
    check_exposure(ServerConfig(**settings))


@pytest.mark.parametrize("flag", ["--tls-client-ca", "--tokens", "--oidc-jwks", "--deny"])
def test_a_file_that_decides_who_may_call_is_writable_by_its_owner_alone(tmp_path: Path, flag: str) -> None:
    files = files_in(Authority.create(tmp_path / "pki").issue_server([]))
    path = Path(files.ca) if flag == "--tls-client-ca" else tmp_path / "file"
    if flag != "--tls-client-ca":
        path.write_text('{"keys": []}' if flag == "--oidc-jwks" else "")
    read: Callable[[], object] = {
        "--tls-client-ca": lambda: ServerCredentials(files),
        "--tokens": lambda: read_records(path),
        "--oidc-jwks": lambda: read_keys(str(path)),
        "--deny": lambda: DenyList(str(path)),
    }[flag]
    read()
    path.chmod(0o664)
    told = f"{path} can be written by its group or others (mode 0664), who could"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)} .*; chmod go-w {path}$"):
        read()
    path.unlink()
    with pytest.raises(ConfigError, match=f"; give a file as {flag} "):
        read()


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
