"""The keeper, as people run it: a parent of the server, which survives what the server does not."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvpool.client.client import Client
from kvpool.protocol.errors import LeaseExpiredError
from kvpool.protocol.types import BlockRun, Quota
from kvpool_server.keeping import store
from kvpool_server.keeping.keeper import MAX_CRASHES
from tests.support.kept_server import KeptServer, children_of, send_as_stranger
from tests.support.processes import is_running, run_command, unread_pipe, wait_for
from tests.support.values import block_hash, group_spec, namespace_spec

CHUNK, BLOCKS = 4_096, 64
SPEC = namespace_spec(group_spec(chunk_bytes=CHUNK), tenant="acme")
RUN = BlockRun(0, [block_hash(nth) for nth in range(BLOCKS)])
BYTES = [bytes([nth]) * CHUNK for nth in range(BLOCKS)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KeptServer]:
    server = KeptServer(tmp_path)
    yield server
    server.close()


def _put(server: KeptServer) -> None:
    with server.connect() as client:
        client.put_blocks(client.open_namespace(SPEC), RUN, BYTES)


def _hits(client: Client, run: BlockRun = RUN) -> int:
    return client.lookup(client.open_namespace(SPEC), [run], lease=False).hits[0].num_leading


def _check_all(server: KeptServer) -> None:
    """All blocks are hits, with their bytes."""
    with server.connect() as client:
        namespace = client.open_namespace(SPEC)
        found = client.lookup(namespace, [RUN])
        assert found.hits[0].num_leading == BLOCKS
        got = client.get_blocks(namespace, found.lease_id, RUN)
        assert [bytes(each) for each in got] == BYTES


def test_a_server_that_is_killed_is_followed_by_one_with_its_blocks_and_a_client_goes_on(server: KeptServer) -> None:
    with server.connect() as client:
        namespace = client.open_namespace(SPEC)
        client.put_blocks(namespace, RUN, BYTES)
        found = client.lookup(namespace, [RUN])
        server.kill_server()
        client.attachment.away()
        again = client.open_namespace(SPEC)
        assert again.boot_token != namespace.boot_token
        assert again.transport is namespace.transport, "the client maps the memory anew"
        with pytest.raises(LeaseExpiredError):
            client.get_blocks(again, found.lease_id, RUN)
    for _ in range(2):
        _check_all(server)
        server.kill_server()
    _check_all(server)
    assert server.says("ended_by='signal 9'")
    server.signal(signal.SIGTERM)
    assert server.wait() == 0


def test_a_server_that_is_killed_from_outside_is_followed_at_once() -> None:
    first_dies = (
        f"import os; from kvpool_server.keeping import store; os.environ[store.ENDED] or (store.notify('READY=1'), "
        f"os.kill(os.getpid(), {signal.SIGKILL:d}))"
    )
    keeps = "import sys; from kvpool_server.keeping import keeper; keeper.DELAY_S = (1e6, 1e6); "
    keeps += f"sys.exit(keeper.Keeper([sys.executable, '-c', {first_dies!r}]).run())"
    assert subprocess.run([sys.executable, "-c", keeps], timeout=60, check=False).returncode == 0


def test_sigusr1_restarts_the_server_with_its_blocks_pins_and_quotas(server: KeptServer) -> None:
    _put(server)
    with server.connect() as client:
        client.admin.set_quotas([Quota("tenant:acme", 4 << 20)])
        assert client.hints.pin(client.open_namespace(SPEC), [RUN], 600).num_blocks == BLOCKS
    before = server.server_pid
    server.signal(signal.SIGUSR1)
    wait_for(lambda: server.server_pid not in (0, before), "another server")
    _check_all(server)
    with server.connect() as client:
        assert [(each.subject, each.limit_bytes) for each in client.admin.quotas()] == [("tenant:acme", 4 << 20)]
        assert client.admin.stats().pinned_bytes == BLOCKS * CHUNK


@pytest.mark.more
def test_the_server_ends_with_its_keeper(server: KeptServer) -> None:
    server.connect().close()
    below = server.server_pid
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: not is_running(below), "the server's end")


PROCESS_1 = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.mark.more
@pytest.mark.skipif(
    subprocess.run([*PROCESS_1, "true"], capture_output=True, check=False).returncode != 0,
    reason="this system gives users no namespaces of their own",
)
def test_a_keeper_that_is_process_1_keeps_blocks_reaps_orphans_and_stops(tmp_path: Path) -> None:
    """As in a container without an init: the workers of a server that is killed become the keeper's children."""
    with closing(KeptServer(tmp_path, isolate=PROCESS_1)) as server:
        _put(server)
        assert re.search(r"^NSpid:.*\t1$", Path(f"/proc/{server.pid}/status").read_text(), re.MULTILINE)
        workers = children_of(server.server_pid)
        assert workers
        server.kill_server()
        _check_all(server)
        wait_for(lambda: not any(Path(f"/proc/{each}").exists() for each in workers), "the end of all orphans")
        assert children_of(server.pid) == [server.server_pid]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.more
def test_a_server_that_dies_again_and_again_starts_without_the_memory(server: KeptServer) -> None:
    _put(server)
    for _ in range(MAX_CRASHES + 1):
        with server.connect() as client:
            assert _hits(client) == BLOCKS
        server.kill_server(signal.SIGABRT)
    with server.connect() as client:
        assert _hits(client) == 0


def test_a_first_server_whose_port_is_taken_ends_its_keeper(tmp_path: Path) -> None:
    """It has given its memory away by then, in which nothing lies."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with closing(KeptServer(tmp_path, endpoint=endpoint)) as server:
            assert server.wait() == 2
            assert server.says(f"cannot listen on {endpoint} for gRPC")


@pytest.mark.more
def test_no_stranger_gives_or_takes_what_is_kept(server: KeptServer) -> None:
    _put(server)
    environment = Path(f"/proc/{server.server_pid}/environ").read_bytes().split(b"\0")
    address = next(each for each in environment if each.startswith(b"NOTIFY_SOCKET="))
    assert address.startswith(b"NOTIFY_SOCKET=" + store.KEEPER.encode())
    send_as_stranger(address.partition(b"=")[2].decode(), "kvpool-arena")
    server.kill_server()
    _check_all(server)


def test_a_server_that_dies_while_it_drains_is_not_followed(server: KeptServer) -> None:
    _put(server)
    with server.connect() as client:
        client.lookup(client.open_namespace(SPEC), [RUN])
        client.admin.drain(60_000)
        os.kill(server.server_pid, signal.SIGKILL)
    assert server.wait() == 128 + signal.SIGKILL


@pytest.mark.more
def test_a_server_whose_file_says_not_to_keep_is_restarted_by_a_signal_alone(tmp_path: Path) -> None:
    settings = tmp_path / "server.toml"
    settings.write_text('keep = "no"')
    with closing(KeptServer(tmp_path, "--config", str(settings))) as server:
        _put(server)
        before = server.server_pid
        server.signal(signal.SIGUSR1)
        wait_for(lambda: server.server_pid not in (0, before), "another server")
        with server.connect() as client:
            assert _hits(client) == 0
        os.kill(server.server_pid, signal.SIGKILL)
        assert server.wait() == 128 + signal.SIGKILL


@pytest.mark.more
def test_a_signal_to_stop_is_passed_on_while_a_server_is_under_way(tmp_path: Path) -> None:
    with closing(KeptServer(tmp_path)) as server:
        wait_for(lambda: server.server_pid, "a server")
        server.signal(signal.SIGTERM)
        assert server.wait() in (0, 128 + signal.SIGTERM)
        with socket.create_server(("127.0.0.1", int(server.endpoint.rpartition(":")[2]))):
            pass


@pytest.mark.more
def test_a_wrong_setting_at_a_restart_is_told_and_can_be_mended(tmp_path: Path) -> None:
    settings = tmp_path / "server.toml"
    settings.write_text("")
    with closing(KeptServer(tmp_path, "--config", str(settings))) as server:
        _put(server)
        settings.write_text("foo = 1")
        server.signal(signal.SIGUSR1)
        wait_for(lambda: server.says("unknown key foo"), "the refusal")
        wait_for(
            lambda: server.says("the server has ended (status 2); another one starts with its memory"), "the keeper"
        )
        settings.write_text("")
        wait_for(lambda: server.says("ended_by='status 2'"), "another server")
        _check_all(server)


KEEPER = "import sys; from kvpool_server.keeping.keeper import Keeper; raise SystemExit(Keeper(sys.argv[1:]).run())"
GIVING = """
import os
from kvpool_server.keeping import store
store.give("kvpool-arena", os.memfd_create("arena"))
store.notify("READY=1")
"""


def test_a_keeper_ends_whose_servers_fail_whatever_they_have_given() -> None:
    code = "print('started', flush=True); raise SystemExit(1)"
    done = run_command(sys.executable, "-c", KEEPER, sys.executable, "-c", GIVING + code)
    assert done.returncode == 1
    assert MAX_CRASHES < done.stdout.count("started") <= 2 * MAX_CRASHES
    assert "the memory is given up" in done.stderr and "and so does its keeper" in done.stderr


FORKS_BADLY = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # As some supervisors leave it.
fork, nth = os.fork, iter(range(9))
def sometimes():
    if 0 < next(nth) < 6:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = sometimes
"""


def test_a_keeper_goes_on_when_the_system_has_no_room_for_a_process() -> None:
    code = f"print('started with', os.environ[{store.OFFERED!r}], flush=True); raise SystemExit(1)"
    done = run_command(sys.executable, "-c", FORKS_BADLY + KEEPER, sys.executable, "-c", GIVING + code)
    assert done.stdout.startswith("started with 0\nstarted with 1\n")
    assert done.stderr.count("no server can start: Resource temporarily unavailable") == 5


@pytest.mark.parametrize("has_reader", [False, True])
def test_a_keeper_goes_on_when_nobody_reads_its_log(tmp_path: Path, has_reader: bool) -> None:
    starts = tmp_path / "starts"
    code = f"print('started', file=open({str(starts)!r}, 'a')); raise SystemExit(1)"
    command = [sys.executable, "-c", KEEPER, sys.executable, "-c", GIVING + code]
    with unread_pipe(has_reader) as log:
        assert subprocess.run(command, stderr=log, timeout=60.0).returncode == 1
    assert len(starts.read_text().splitlines()) > MAX_CRASHES
