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


@pytest.mark.parametrize("name", TIMES)
def test_times_are_whole_milliseconds_within_bounds(name: str) -> None:
    for value in (1, 600_000):
        assert getattr(ClientConfig(**{name: value}), name) == value
    for wrong in (0, -1, 600_001, 1.5, "100", None):
        with pytest.raises(ConfigError, match=f"{name} is .*; give whole milliseconds from 1 to 600000"):
            ClientConfig(**{name: wrong})  # type: ignore[arg-type]


def test_endpoints() -> None:
    for endpoint in ("localhost:1", "10.0.0.7:65535", "[::1]:50051", "unix:/run/pool", "unix:a b.sock"):
        assert ClientConfig(endpoint=endpoint).endpoint == endpoint
    for endpoint in ("", "host", "host:", ":50051", "host:port", "host:0", "host:65536", "host:-1", "host:²"):
        told = f"{endpoint!r} is not HOST:PORT, for example '127.0.0.1:50051'"
        with pytest.raises(ConfigError, match=re.escape(told)):
            ClientConfig(endpoint=endpoint)
    for transport in ("tcp", "mooncake"):
        with pytest.raises(ConfigError, match=f"transport={transport} needs an endpoint HOST:PORT"):
            ClientConfig(endpoint="unix:/run/pool", transport=transport)
    assert {*CANDIDATES} == {*TRANSPORTS}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("insecure_network", "false", "insecure_network is 'false'; give True or False"),
        ("endpoint", 5, "endpoint is 5; give text"),
        (
            "endpoint",
            "unix:///run/pool",
            "'unix:///run/pool' is not unix:PATH; leave out //, and give 'unix:/run/pool'",
        ),
        ("endpoint", "unix:", "'' is not the path of a Unix socket; give one such as /run/kvpool/kvpool.sock"),
        ("endpoint", "unix:" + 200 * "x", "has 200 bytes, and a Unix socket's path 100 at most; give a shorter path"),
        ("transport", "pigeon", "transport 'pigeon' is not one of auto, shm, tcp, grpc, mooncake, network"),
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
def test_a_wrong_value_is_refused_with_what_to_write(name: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        ClientConfig(**{name: value})


def test_tls_may_be_a_mapping_as_in_the_connector() -> None:
    config = ClientConfig(tls={"ca": "a", "cert": "b", "key": "c"})  # type: ignore[arg-type]
    assert config.tls == TlsFiles("a", "b", "c")
    assert dataclasses.replace(config, timeout_ms=5).tls == config.tls
