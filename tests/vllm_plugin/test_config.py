import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvpool.protocol.errors import ConfigError
from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from tests.support.certificates import files_in
from vllm_plugin.config import ConnectorConfig


def test_tls_names_the_files_and_the_tenant(tmp_path: Path) -> None:
    files = files_in(Authority.create(tmp_path).issue_principal(Principal("acme", Role.ENGINE_WRITE)))
    config = ConnectorConfig.parse({"tls": dataclasses.asdict(files)})
    assert config.tls == config.client_config().tls == files
    assert config.tenant == "acme"
    assert ConnectorConfig.parse({"tls": dataclasses.asdict(files), "tenant": "acme"}).tenant == "acme"
    token = {"tls": {"ca": files.ca}, "token_file": "token", "tenant": "umbra"}
    assert ConnectorConfig.parse(token).tenant == "umbra"


@pytest.mark.parametrize(
    ("role", "tenant", "told"),
    [
        (Role.ENGINE_WRITE, "umbra", "tenant = 'umbra', and tls.cert = '.*' is of tenant 'acme'; leave tenant out"),
        (Role.OPERATOR, "", "tls.cert = '.*' is of role operator; give one of role engine-write"),
        (Role.TENANT_OPERATOR, "acme", "tls.cert = '.*' is of role tenant-operator; give one of role engine-write"),
        (None, "", "tls.cert = '.*' names no principal"),
    ],
)
def test_a_certificate_that_a_server_would_refuse(tmp_path: Path, role: Role | None, tenant: str, told: str) -> None:
    authority = Authority.create(tmp_path)
    directory = authority.issue_server([])
    if role is not None:
        directory = authority.issue_principal(Principal("acme" if role.has_tenant else ALL_TENANTS, role))
    with pytest.raises(ConfigError, match=f"kv_connector_extra_config: {told}"):
        ConnectorConfig.parse({"tls": dataclasses.asdict(files_in(directory)), "tenant": tenant})


OUT_OF_BOUNDS: list[tuple[str, Any]] = [
    ("endpoint", "no-port"),
    ("transport", "rdma"),
    ("lookup_timeout_ms", 0),
    ("promotion_wait_ms", 300_001),
    ("load_timeout_ms", 600_001),
    ("store_timeout_ms", 0),
    ("window_interval_tokens", 0),
    ("max_pinned_fraction", 1.01),
    ("max_pinned_fraction", float("nan")),
    ("num_shards", 65),
    ("stream_connections", 17),
]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tls": {"ca": "CA"}}, r"tls has ca = '.*' alone.*; give cert and key, too, or token_file"),
        ({"tls": {}}, r"tls.*the paths ca, cert and key"),
        ({"tls": "dir"}, r"tls.*the paths ca, cert and key"),
        ({"tls": {"ca": "a", "crt": "b"}}, r"tls.*the paths ca, cert and key"),
        ({"tls": {"ca": "a", "cert": "b", "key": 1}}, r"tls.*key = 1 is no"),
        ({"tls": {"ca": "/nowhere/file", "cert": "b", "key": "c"}}, "cannot read /nowhere/file"),
        ({"name_key_file": "/nowhere/file"}, "cannot read /nowhere/file"),
        ({"endpont": 1}, "unknown key 'endpont'; did you mean 'endpoint'"),
        ({"loadtimeout_ms": 1}, "unknown key 'loadtimeout_ms'; did you mean 'load_timeout_ms'"),
        ({"zzz": 1}, r"unknown key 'zzz'; the keys are endpoint, transport, .*salt"),
        ({"endpoint": 50051}, "endpoint = 50051: Input should be a valid string"),
        ({"lookup_timeout_ms": 0.5}, r"lookup_timeout_ms = 0\.5: Input should be a valid integer"),
        ({"store_decoded": "false"}, "store_decoded = 'false': Input should be a valid boolean"),
        ({"max_pinned_fraction": True}, "max_pinned_fraction = True: Input should be a valid number"),
        *(({key: value}, key) for key, value in OUT_OF_BOUNDS),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_with_the_fix(given: dict[str, Any], told: str, tmp_path: Path) -> None:
    if given == {"tls": {"ca": "CA"}}:
        given = {"tls": {"ca": files_in(Authority.create(tmp_path).issue_server([])).ca}}
    with pytest.raises(ConfigError, match=told):
        ConnectorConfig.parse(given)


def test_bounds_themselves_are_allowed() -> None:
    most = {"max_pinned_fraction": 1, "num_shards": 64, "load_timeout_ms": 300_000}
    least = {"max_pinned_fraction": 0.001, "num_shards": 0, "load_timeout_ms": 1, "window_interval_tokens": 1}
    for given in (most, least):
        ConnectorConfig.parse(given)


def test_the_client_has_leases_that_outlive_the_slowest_load_and_the_given_connections() -> None:
    given = {"load_timeout_ms": 7_000, "store_timeout_ms": 9_000, "stream_connections": 3}
    config = ConnectorConfig.parse(given).client_config()
    assert config.lease_ttl_ms > 7_000
    assert config.data_timeout_ms >= 9_000
    assert config.stream_connections == 3
