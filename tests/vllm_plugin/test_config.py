import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvpool.protocol.errors import ConfigError
from kvpool.security.certificates import Authority
from kvpool.security.name_key import NameKey
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from tests.support.certificates import files_in
from vllm_plugin.config import ConnectorConfig


def test_defaults_serve_a_pool_on_this_host() -> None:
    config = ConnectorConfig.parse({})
    assert config == ConnectorConfig()
    assert config.client_config().endpoint == "127.0.0.1:50051"


def test_every_key_reaches_the_configuration(tmp_path: Path) -> None:
    NameKey.create(tmp_path / "name.key")
    given = {
        "endpoint": "pool:1234", "transport": "network", "lookup_timeout_ms": 1, "promotion_wait_ms": 0,
        "load_timeout_ms": 2, "store_timeout_ms": 3, "store_decoded": False, "window_interval_tokens": 512,
        "max_pinned_fraction": 0.25, "decline_slow_loads": False, "share_adapters": "never",
        "otel": True, "num_shards": 8,
        "weights_epoch": "7", "tenant": "t", "salt": "s", "insecure_network": True, "token_file": "f",
        "stream_connections": 2, "name_key_file": str(tmp_path / "name.key"),
    }  # fmt: skip
    config = ConnectorConfig.parse(given)
    assert {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} == {**given, "tls": None}


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


def test_an_engine_that_proves_nothing_is_told(tmp_path: Path) -> None:
    ca = files_in(Authority.create(tmp_path).issue_server([])).ca
    with pytest.raises(ConfigError, match=r"tls has ca = '.*' alone.*; give cert and key, too, or token_file"):
        ConnectorConfig.parse({"tls": {"ca": ca}})


@pytest.mark.parametrize("tls", [{}, "dir", {"ca": "a", "crt": "b"}, {"ca": "a", "cert": "b", "key": 1}])
def test_tls_that_is_no_paths_is_refused(tls: object) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_connector_extra_config: tls.*(the paths ca, cert and key|key = 1 is no)"
    ):
        ConnectorConfig.parse({"tls": tls})


@pytest.mark.parametrize(
    "given", [{"tls": {"ca": "/nowhere/file", "cert": "b", "key": "c"}}, {"name_key_file": "/nowhere/file"}]
)
def test_a_file_that_is_not_there_is_named_at_the_start(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot read /nowhere/file"):
        ConnectorConfig.parse(given)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("endpont", "endpoint"), ("loadtimeout_ms", "load_timeout_ms"), ("store_decode", "store_decoded")],
)
def test_an_unknown_key_is_answered_with_the_one_that_was_meant(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; did you mean '{meant}'"):
        ConnectorConfig.parse({key: 1})


def test_a_key_like_no_other_is_answered_with_all_keys() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'zzz'; the keys are endpoint, transport, .*salt"):
        ConnectorConfig.parse({"zzz": 1})


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("endpoint", 50051, "valid string"),
        ("lookup_timeout_ms", "200", "valid integer"),
        ("lookup_timeout_ms", 0.5, "valid integer"),
        ("lookup_timeout_ms", True, "valid integer"),
        ("lookup_timeout_ms", None, "valid integer"),
        ("store_decoded", "false", "valid boolean"),
        ("store_decoded", 0, "valid boolean"),
        ("max_pinned_fraction", "0.5", "valid number"),
        ("max_pinned_fraction", True, "valid number"),
        ("window_interval_tokens", 4096.0, "valid integer"),
        ("tenant", 1, "valid string"),
    ],
)
def test_a_value_of_another_type_is_refused(key: str, value: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_connector_extra_config: {key} = .*: Input should be a {wanted}"):
        ConnectorConfig.parse({key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("endpoint", "no-port"),
        ("endpoint", "host:0"),
        ("transport", "rdma"),
        ("lookup_timeout_ms", 0),
        ("lookup_timeout_ms", -1),
        ("promotion_wait_ms", -1),
        ("promotion_wait_ms", 300_001),
        ("load_timeout_ms", 0),
        ("load_timeout_ms", 600_001),
        ("store_timeout_ms", 0),
        ("window_interval_tokens", 0),
        ("window_interval_tokens", -1),
        ("max_pinned_fraction", 0),
        ("max_pinned_fraction", 1.01),
        ("max_pinned_fraction", float("nan")),
        ("num_shards", -1),
        ("num_shards", 65),
        ("stream_connections", 17),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_the_name_that_was_given(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        ConnectorConfig.parse({key: value})


def test_bounds_themselves_are_allowed() -> None:
    ConnectorConfig.parse({"max_pinned_fraction": 1, "num_shards": 64, "load_timeout_ms": 300_000})
    ConnectorConfig.parse({"window_interval_tokens": 1})
    ConnectorConfig.parse({"max_pinned_fraction": 0.001, "num_shards": 0, "load_timeout_ms": 1})


def test_the_client_has_leases_that_outlive_the_slowest_load_and_the_given_connections() -> None:
    given = {"load_timeout_ms": 7_000, "store_timeout_ms": 9_000, "stream_connections": 3}
    config = ConnectorConfig.parse(given).client_config()
    assert config.lease_ttl_ms > 7_000
    assert config.data_timeout_ms >= 9_000
    assert config.stream_connections == 3
