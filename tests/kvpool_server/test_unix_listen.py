"""A server that engines reach by a Unix socket."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import ConfigError
from kvpool.transport.unix_socket import MAX_PATH_BYTES, memory_path
from tests.conftest import StartServer
from tests.support.processes import run_command, run_server
from tests.support.values import group_spec, namespace_spec, payload, run_of

CHUNK = 100_000
NOWHERE = ("--listen", "127.0.0.1:0", "--http-listen", "", "--memory", "1MiB")


@pytest.fixture
def path(socket_dir: Path) -> str:
    return str(socket_dir / "100% kvpool?#ü.sock")  # gRPC takes paths as parts of a URI.


def _config(path: str, **fields: object) -> ClientConfig:
    return ClientConfig(f"unix:{path}", **{"timeout_ms": 10_000, "data_timeout_ms": 10_000, **fields})  # type: ignore[arg-type]


def _round_trip(config: ClientConfig) -> str:
    """Stores blocks and loads them; returns the name of the transport."""
    with Client(config) as client:
        namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK)))
        run = run_of("a", "b")
        client.put_blocks(namespace, run, [payload(name, CHUNK) for name in "ab"])
        blocks = client.get_blocks(namespace, client.lookup(namespace, [run]).lease_id, run)
        assert [block is not None and block.tobytes() for block in blocks] == [
            payload(name, CHUNK).tobytes() for name in "ab"
        ]
        return namespace.transport.name


def test_blocks_travel_through_a_unix_socket_alone(
    pool_server: StartServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = pool_server("--unix-listen", path)
    for transport, taken in (("auto", "shm"), ("shm", "shm"), ("network", "grpc"), ("grpc", "grpc")):
        assert _round_trip(_config(path, transport=transport)) == taken
    done = run_command(str(Path(sys.executable).with_name("kvpool")), "ping", "--endpoint", f"unix:{path}")
    assert done.returncode == 0 and "by shm: client and server share memory" in done.stdout
    monkeypatch.chdir(Path(path).parent)
    assert _round_trip(_config(Path(path).name)) == "shm", "a relative path is as good"
    assert json.dumps({"endpoint": f"unix:{path}"}, separators=(",", ":")) in server.stdout


def test_sockets_of_a_killed_server_are_replaced_and_those_of_a_live_one_are_left_to_it(
    pool_server: StartServer, path: str
) -> None:
    pool_server("--unix-listen", path).kill()
    assert os.path.exists(path) and os.path.exists(memory_path(path))
    pool_server("--unix-listen", path)
    assert _round_trip(_config(path)) == "shm"
    for named in (memory_path(path), path):  # The memory socket is the first that a second server finds.
        done = run_server(*NOWHERE, "--unix-listen", path)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert f"another server listens on {named}; stop that server, or give --unix-listen another path" in done.stderr
        if named != path:
            os.unlink(named)
    with Client(_config(path)) as client:
        choice = client.admin.try_transport()
        with closing(choice.transport):
            assert choice.transport.name == "grpc" and choice.is_fallback
            assert f"{memory_path(path)!r} cannot be reached from here: No such file or directory" in choice.route
    assert _round_trip(_config(path)) == "grpc", "a client that gets no memory"


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_socket_is_not_replaced(make: object, path: str) -> None:
    assert callable(make)
    make(Path(path))
    done = run_server(*NOWHERE, "--unix-listen", path)
    assert done.returncode == 2 and f"{path} exists and is not a socket" in done.stderr
    assert Path(path).is_symlink() or Path(path).exists()
    assert not os.path.exists(memory_path(path)), "a server that did not start left a socket"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("ü" * (MAX_PATH_BYTES // 2 + 1), f"and a Unix socket's path {MAX_PATH_BYTES} at most; give a shorter path"),
        ("/run/", "is not the path of a Unix socket"),
        ("a\0b", "is not the path of a Unix socket"),
        ("/no/such/socket", "see --unix-listen: No such file or directory; make its directory first"),
    ],
)
def test_paths_at_which_no_socket_can_be(bad: str, says: str) -> None:
    if "such" not in bad:  # The client cannot know which directories there will be.
        with pytest.raises(ConfigError, match=says):
            ClientConfig(f"unix:{bad}")
    if "\0" not in bad:
        done = run_server(*NOWHERE, "--unix-listen", bad)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and says in done.stderr


def test_the_longest_path_serves(pool_server: StartServer, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(socket_dir)
    longest = "x" * MAX_PATH_BYTES
    pool_server("--unix-listen", longest)
    assert _round_trip(_config(longest)) == "shm"
