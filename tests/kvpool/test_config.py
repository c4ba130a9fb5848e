import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.config import TRANSPORTS, ClientConfig
from kvpool.client.transport_choice import CANDIDATES
from kvpool.protocol.errors import ConfigError
from kvpool.security.tls import TlsFiles

TIMES = [field.name for field in dataclasses.fields(ClientConfig) if field.name.endswith("_ms")]


@pytest.mark.parametrize(
    "endpoint", ["localhost:1", "10.0.0.7:65535", "[::1]:50051", "unix:/run/pool", "unix:a b.sock"]
)
def test_endpoints(endpoint: str) -> None:
    assert ClientConfig(endpoint=endpoint).endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint", ["", "host", "host:", ":50051", "host:port", "host:0", "host:65536", "host:-1", "host:²"]
)
def test_what_is_no_endpoint_is_refused_with_an_example(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"is not HOST:PORT, for example '127\.0\.0\.1:50051'") as caught:
        ClientConfig(endpoint=endpoint)
    assert repr(endpoint) in str(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("unix:///run/pool", "'unix:///run/pool' is not unix:PATH; leave out //, and give 'unix:/run/pool'"),
        ("unix:", "'' is not the path of a Unix socket; give one such as /run/kvpool/kvpool.sock"),
        ("unix:" + 200 * "x", "has 200 bytes, and a Unix socket's path 100 at most; give a shorter path"),
    ],
)
def test_a_unix_endpoint_that_is_none_says_what_to_write(endpoint: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        ClientConfig(endpoint=endpoint)


@pytest.mark.parametrize("transport", ["tcp", "mooncake"])
def test_transports_that_need_a_host_are_refused_with_a_unix_endpoint(transport: str) -> None:
    with pytest.raises(ConfigError, match=f"transport={transport} needs an endpoint HOST:PORT"):
        ClientConfig(endpoint="unix:/run/pool", transport=transport)


def test_every_transport_setting_has_candidates() -> None:
    assert {*CANDIDATES} == {*TRANSPORTS}


def test_an_unknown_transport_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="transport 'pigeon' is not one of auto, shm, tcp, grpc, mooncake, network"):
        ClientConfig(transport="pigeon")


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [0, -1, 600_001, 1.5, "100", None])
def test_times_are_whole_milliseconds_within_bounds(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*; give whole milliseconds from 1 to 600000"):
        ClientConfig(**{name: value})


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [1, 600_000])
def test_the_bounds_themselves_are_good(name: str, value: int) -> None:
    assert getattr(ClientConfig(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("insecure_network", "false", "insecure_network is 'false'; give True or False"),
        ("endpoint", 5, "endpoint is 5; give text"),
        ("token_file", 5, "token_file is 5; give text"),
        ("server_name", 5, "server_name is 5; give text"),
        ("server_name", "kvpool.svc", "server_name kvpool.svc without tls proves nothing; give tls with ca, too"),
        ("stream_connections", True, "stream_connections is True; give 0 to 16"),
        ("local_clients", True, "local_clients is True; give 1 or more"),
        ("timeout_ms", True, "timeout_ms is True; give whole milliseconds"),
        ("tls", "pki", "tls = 'pki' does not have the paths ca, cert and key; give TlsFiles(ca, cert, key)"),
        ("tls", {"cert": "a", "key": "b"}, "does not have the paths ca, cert and key"),
        ("tls", {"ca": Path("a")}, "tls: ca = PosixPath('a') is not a path as text; give str(path)"),
        ("tls", TlsFiles("", "", ""), "has no ca; give the authority of the server's certificate"),
        ("tls", TlsFiles("a", "b", 5), "tls: key = 5 is not a path"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        ClientConfig(**{name: value})


def test_tls_may_be_a_mapping_as_in_the_connector() -> None:
    config = ClientConfig(tls={"ca": "a", "cert": "b", "key": "c"})  # type: ignore[arg-type]
    assert config.tls == TlsFiles("a", "b", "c")
    assert dataclasses.replace(config, timeout_ms=5).tls == config.tls
