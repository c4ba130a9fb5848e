import dataclasses
import re
from typing import Any

import pytest

from kvpool.config import TRANSPORTS, ClientConfig, check_endpoint
from kvpool.errors import ConfigError
from kvpool.transport.choice import CANDIDATES

TIMES = [field.name for field in dataclasses.fields(ClientConfig) if field.name.endswith("_ms")]


@pytest.mark.parametrize(
    "endpoint", ["localhost:1", "10.0.0.7:65535", "[::1]:50051", "unix:/run/pool", "unix:a b.sock"]
)
def test_endpoints(endpoint: str) -> None:
    assert check_endpoint(endpoint) == endpoint


@pytest.mark.parametrize("endpoint", ["", "host", "host:", ":50051", "host:port", "host:0", "host:65536", "host:-1"])
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transports(transport: str) -> None:
    assert ClientConfig(transport=transport).transport == transport


def test_an_unknown_transport_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="transport 'pigeon' is not one of auto, shm, tcp, grpc, mooncake, stream"):
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


def test_a_config_is_a_value() -> None:
    config = ClientConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.timeout_ms = 5  # type: ignore[misc]
    with pytest.raises(TypeError, match="no_such_setting"):
        ClientConfig(no_such_setting=1)  # type: ignore[call-arg]
