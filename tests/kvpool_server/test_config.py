import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer

from kvpool.cli import app
from kvpool.protocol.errors import ConfigError
from kvpool_server.cache.eviction import POLICIES
from kvpool_server.process.addresses import name_for_clients
from kvpool_server.settings import config, loading
from kvpool_server.settings.config import ServerConfig
from kvpool_server.settings.loading import service_links
from tests.support.processes import run_command, run_server, server_command

KEYS = tuple(ServerConfig.model_fields)


def load(flags: dict[str, Any], file: Path | None, environment: dict[str, str]) -> ServerConfig:
    with patch.dict(os.environ, environment, clear=True):
        return loading.load({**flags, "config": str(file)} if file else flags)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "kvpool.toml"


def test_flag_beats_environment_beats_file_beats_default(toml: Path) -> None:
    toml.write_text('grace_ms = 1\ndrain_ms = 1\nlisten = "127.0.0.1:1"\n')
    environment = {"KVPOOL_GRACE_MS": "2", "KVPOOL_DRAIN_MS": "2"}
    settings = load({"grace_ms": 3}, toml, environment)
    assert (settings.grace_ms, settings.drain_ms, settings.listen) == (3, 2, "127.0.0.1:1")
    assert settings.max_ttl_ms == ServerConfig().max_ttl_ms


def test_the_file_may_be_named_in_the_environment(toml: Path) -> None:
    toml.write_text('grace_ms = 1\nquota = ["tenant:a=1GiB", "namespace:0123456789ab=2GiB"]\n')
    assert load({}, toml, {}).quota == ("tenant:a=1GiB", "namespace:0123456789ab=2GiB")
    assert load({"quota": ["tenant:c=1B"]}, toml, {"KVPOOL_QUOTA": "tenant:b=1B"}).quota == ("tenant:c=1B",)
    assert load({}, None, {"KVPOOL_CONFIG": str(toml)}).grace_ms == 1
    assert load({"config": ""}, None, {"KVPOOL_CONFIG": str(toml)}).grace_ms == ServerConfig().grace_ms
    toml.write_text("grace_ms = -1\n")
    with pytest.raises(ConfigError, match=f"config file {toml}"):
        load({}, None, {"KVPOOL_CONFIG": str(toml)})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("listen", "[::1]:65535", "[::1]:65535"),
        ("http_listen", "", ""),
        ("data_listen", "", ""),
        ("unix_mode", "0660", "0660"),
        ("data_workers", 3, 3),
        ("limit", ["leases=5", "spiffe://d/k/a/b,leases=7"], ("leases=5", "spiffe://d/k/a/b,leases=7")),
        ("insecure_network", True, True),
        ("memory", "2MiB", 2 << 20),
        ("policy", "lru", "lru"),
        ("tier", ["file:/a,size=1GiB", "file:/b,size=2GiB"], ("file:/a,size=1GiB", "file:/b,size=2GiB")),
        ("quota", "tenant:a=1GiB,tenant:b=7B", ("tenant:a=1GiB", "tenant:b=7B")),
        ("kv_events_tenant", ["a=tcp://h:1,tcp://h:2", "b=ipc:///b"], ("a=tcp://h:1,tcp://h:2", "b=ipc:///b")),
    ],
)
def test_each_type_of_setting_can_come_from_each_source(name: str, value: Any, expected: Any, toml: Path) -> None:
    toml.write_text(f"{name} = {str(value).lower() if value is True else repr(value)}\n")
    assert getattr(load({name: value}, None, {}), name) == expected
    variable = ";".join(value) if isinstance(value, list) else str(value)
    assert getattr(load({}, None, {f"KVPOOL_{name.upper()}": variable}), name) == expected
    assert getattr(load({}, toml, {}), name) == expected


@pytest.mark.parametrize(
    ("key", "hint"),
    [("memry", r"did you mean memory\? "), ("verbose", ""), ("config", "")],  # A file names no other.
)
def test_an_unknown_key_is_an_error_that_names_the_nearest_one(key: str, hint: str, toml: Path) -> None:
    toml.write_text(f'{key} = "1"\n')
    with pytest.raises(ConfigError, match=rf"config file {toml}: unknown key {key}; {hint}see kvpool-server --help$"):
        load({}, toml, {})
    with pytest.raises(ConfigError, match=r"environment: unknown key KVPOOL_MEMRY; did you mean KVPOOL_MEMORY\?"):
        load({}, None, {"KVPOOL_MEMRY": "1", "PATH": "/bin"})
    with pytest.raises(ConfigError, match="memry"):
        load({"memry": 1}, None, {})


LINKS = {
    "KVPOOL_SERVICE_HOST": "10.0.171.239",
    "KVPOOL_SERVICE_PORT": "50051",
    "KVPOOL_SERVICE_PORT_GRPC": "50051",
    "KVPOOL_SERVICE_PORT_DATA_PORT": "50053",
    "KVPOOL_PORT": "tcp://10.0.171.239:50051",
    "KVPOOL_PORT_50051_TCP": "tcp://10.0.171.239:50051",
    "KVPOOL_PORT_50051_TCP_PROTO": "tcp",
    "KVPOOL_PORT_50051_TCP_PORT": "50051",
    "KVPOOL_PORT_50051_TCP_ADDR": "10.0.171.239",
    "KVPOOL_PORT_53_UDP": "udp://10.0.171.239:53",
    "KVPOOL_PORT_53_UDP_PROTO": "udp",
    "KVPOOL_PORT_53_UDP_PORT": "53",
    "KVPOOL_PORT_53_UDP_ADDR": "10.0.171.239",
    "KVPOOL_PORT_9_SCTP": "sctp://[fd00::1]:9",
}
"""What Kubernetes sets for a Service named kvpool."""


@pytest.mark.parametrize("service", ["KVPOOL", "KVPOOL_SERVER", "KVPOOL_TIER", "KVPOOL_LISTEN_2"])
def test_links_to_kubernetes_services_are_no_settings(service: str) -> None:
    links = {name.replace("KVPOOL", service, 1): value for name, value in LINKS.items()}
    assert load({}, None, {**links, "KVPOOL_MEMORY": "2MiB"}).memory == 2 << 20
    assert service_links({**links, "KVPOOL_MEMORY": "2MiB", "PATH": "/bin"}) == set(links)


@pytest.mark.parametrize("name", [*ServerConfig.model_fields, "endpoint"])
def test_no_setting_has_the_name_of_a_link(name: str) -> None:
    variable = f"KVPOOL_{name.upper()}"
    for value in set(LINKS.values()):
        assert variable not in service_links({**LINKS, variable: value})


@pytest.mark.parametrize(
    ("name", "others"),
    [
        *((name, LINKS) for name in ("KVPOOL_PORTS", "KVPOOL_SERVICE_HOSTS", "KVPOOL_DATA_PORT", "KVPOOL_MEMRY")),
        *((name, {}) for name in ("KVPOOL_PORT", "KVPOOL_SERVICE_PORT", "KVPOOL_PORT_50051_TCP_ADDR")),
    ],
)
def test_a_typo_beside_links_and_a_link_of_no_service_are_errors(name: str, others: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=rf"environment: unknown key {name};"):
        load({}, None, {**others, name: "1"})


def test_no_variable_that_a_command_reads_stops_a_server() -> None:
    def variables(command: Any) -> set[str]:
        own = {each.envvar for each in command.params if each.envvar}
        return own.union(*map(variables, getattr(command, "commands", {}).values()))

    names = variables(typer.main.get_command(app))
    assert {"KVPOOL_TLS", "KVPOOL_ENDPOINT"} <= names
    assert load({}, None, dict.fromkeys(names, "no")) == load({}, None, {})


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        *(("memory", size, "") for size in ("lots", "12XB", "-1GiB", "", "1023KiB", 0)),
        ("max_ttl_ms", 3_600_001, ""),
        ("grace_ms", -1, ""),
        ("grace_ms", "soon", ""),
        ("drain_ms", 600_001, ""),
        *(
            ("kv_events", url, "")
            for url in ("127.0.0.1:5557", "tcp://5557", "tcp://host:port", "udp://127.0.0.1:5557")
        ),
        ("kv_events_replay", "ipc://", ""),
        ("kv_events_tenant", "tcp://127.0.0.1:1", ""),
        ("kv_events_tenant", "acme=tcp://h:1,tcp://h:2,tcp://h:3", ""),
        *(("kv_events_tenant", tenant, "") for tenant in ("acme=tcp://h", "acme=", "_=tcp://h:1")),
        ("kv_events_tenant", ["acme=tcp://h:1", "acme=tcp://h:2"], ""),
        ("max_ttl_ms", "0", "not possible; give at least 100"),
        ("kv_events_buffer", "0", "not possible; give at least 1000"),
        ("data_workers", "65", "not possible; give at most 64"),
        ("data_workers", "x", "not possible; give a whole number"),
        ("grace_ms", 1.5, "not possible; give a whole number"),
        ("kv_events_medium", "", "not possible; give a text that is not empty"),
        ("insecure_network", "perhaps", "not possible; give yes or no"),
        ("listen", 7, "not possible; give a text"),
        ("unix_mode", "01777", "not possible; give octal digits for owner, group and others, such as 0660"),
        ("kv_events_topic", "kv@pool", "not possible; give a text without @, which separates the parts of a topic"),
        ("trust_domain", "Corp", "trust domain 'Corp' is not a lower-case DNS name"),
        *(
            (name, address, f"{address!r} is not HOST:PORT")
            for name in ("listen", "http_listen", "data_listen")
            for address in ("localhost", ":50051", "host:", "host:port", "host:-1")
            if name == "listen" or address == "localhost"
        ),
        ("data_listen", "host:65536", "65536 is not a port"),
        ("quota", ["acme=1GiB"], "quota subject 'acme' is neither tenant:NAME"),
        ("quota", ["tenant:a=1GiB", "tenant:a=2GiB"], "tenant:a has two quotas"),
        ("quota", ["tenant:a=0"], "tenant:a=0 gives a size of 0"),
        ("quota", ["tenant:a=20"], "quota 'tenant:a=20' has no unit; give tenant:a=20GiB, or tenant:a=20B if"),
        ("quota", ["tenant:a=much"], "quota 'tenant:a=much': 'much' is not a size"),
        *(
            ("pin_budget", budget, "not a budget; give a percentage up to 100%")
            for budget in ("", "101%", "-1%", "ten%", "10%%", "nan%", "much", "-5", "1e3")
        ),
        *(
            ("pin_budget", budget, "a number without a unit; give a percentage such as 20%, or a size such as")
            for budget in ("200", "20.5", " 1 ")
        ),
    ],
)
def test_an_error_says_what_to_give(name: str, value: Any, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({name: value}, None, {})
    told = f"setting {name} = {value!r} (--{name.replace('_', '-')}): {fix}"
    assert str(caught.value).startswith(told) and str(caught.value).endswith("; see kvpool-server --help")
    assert config.describe(name)[0] not in str(caught.value)


def test_a_bad_value_names_its_source_and_a_file_that_cannot_be_read_is_named(toml: Path) -> None:
    with pytest.raises(ConfigError, match=f"config file {toml}: No such file or directory; give --config a TOML file"):
        load({}, toml, {})
    for text in (b"memory 1GiB", b"\xff\xfe"):
        toml.write_bytes(text)
        with pytest.raises(ConfigError, match=f"config file {toml} is not TOML: "):
            load({}, toml, {})
    toml.write_text('memory = "lots"\n')
    for file, environment, source in ((toml, {}, str(toml)), (None, {"KVPOOL_MEMORY": "lots"}, "KVPOOL_MEMORY")):
        with pytest.raises(ConfigError, match=source):
            load({}, file, environment)
    with pytest.raises(ConfigError, match=rf"^unknown policy 'x' \(--policy\); choose {' or '.join(POLICIES)}$"):
        load({"policy": "x"}, None, {})
    for choice in ("kv_events_hashes", "log_level", "log_format"):
        with pytest.raises(ConfigError, match=rf"^unknown {choice} 'loud' \(--{choice.replace('_', '-')}\); choose "):
            load({choice: "loud"}, None, {})


def test_every_setting_has_a_description_and_a_flag() -> None:
    done = run_command(*server_command("--help"), COLUMNS="200", TERM="dumb")
    assert done.returncode == 0
    words = " ".join(done.stdout.replace("│", " ").split())
    for name in KEYS:
        meaning, default = config.describe(name)
        assert meaning and f"{meaning} (default: {default or 'none'})" in words, name
        assert f"--{name.replace('_', '-')}" in words


@pytest.mark.parametrize(
    ("flags", "environment", "says"),
    [
        (["--memory", "lots"], {}, "memory"),
        (["--kv-events-replay", "tcp://127.0.0.1:0"], {}, "give --kv-events, too"),
        (["--kv-events", "tcp://127.0.0.1:0", "--kv-events-key", "k"], {}, "--kv-events-subscribers; give both"),
        (["--kv-events-key", "k", "--kv-events-subscribers", "l"], {}, "protects nothing without events"),
        (["--unix-mode", "0600"], {}, "--unix-mode 0600 has no effect without a Unix socket; give --unix-listen PATH"),
    ],
)
def test_a_bad_setting_ends_the_server_with_one_sentence(
    flags: list[str], environment: dict[str, str], says: str
) -> None:
    done = run_server(*flags, **environment)
    assert done.returncode == 2
    assert done.stderr.startswith("kvpool-server: ") and len(done.stderr.strip().splitlines()) == 1
    assert says in done.stderr


@pytest.mark.parametrize(
    ("budget", "share"), [("0%", 0.0), ("12.5%", 0.125), ("100%", 1.0), ("256KiB", 0.25), ("1 MiB", 1.0), ("4MiB", 1.0)]
)
def test_a_pin_budget_is_a_share_of_the_memory(budget: str, share: float) -> None:
    assert load({"pin_budget": budget, "memory": "1MiB"}, None, {}).pin_share == share


@pytest.mark.parametrize(
    ("host", "names", "name"),
    [
        ("0.0.0.0", (), "this-host"),
        ("0.0.0.0", ("kvpool.example.com", "this-host", "localhost"), "this-host"),
        ("::", ("localhost", "127.0.0.1", "::1", "*.example.com", "kvpool.example.com"), "kvpool.example.com"),
        ("10.0.0.1", ("kvpool.example.com", "localhost"), "kvpool.example.com"),
        ("127.0.0.1", ("kvpool.example.com", "localhost"), "localhost"),
        ("127.0.0.1", ("kvpool.example.com",), "127.0.0.1"),
    ],
)
def test_clients_call_a_server_by_a_name_of_its_certificate(
    host: str, names: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "this-host")
    assert name_for_clients(host, names) == name
