"""What a server makes of the descriptors that its service manager hands it, whatever they are."""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpool.protocol.errors import PermissionDeniedError, UnknownNamespaceError
from kvpool.protocol.types import BlockRun
from kvpool.security.principal import Role
from kvpool.transport.segment import TRAILER_BYTES, sealed_file
from kvpool_server.keeping import head, store, table
from kvpool_server.keeping.adoption import ARENA, MAX_BEGUN
from kvpool_server.keeping.table import TABLE
from tests.support.kept_server import KeptServer, Manager, children_of
from tests.support.processes import wait_for
from tests.support.secured_server import SecuredServer
from tests.support.values import block_hash, group_spec, namespace_spec

CHUNK, BLOCKS = 4_096, 16
SPEC = namespace_spec(group_spec(chunk_bytes=CHUNK))
RUN = BlockRun(0, [block_hash(nth) for nth in range(BLOCKS)])
MIB = 1 << 20
GIVEN_UP = "the memory of the server before is given up"

Start = Callable[..., KeptServer]


class Rig:
    """A manager, and the servers that it starts."""

    def __init__(self, directory: Path, stack: ExitStack):
        self.directory = directory
        self._stack = stack
        self.manager = Manager(directory)
        stack.callback(self.manager.close)

    def start(self, *flags: str, inherited: dict[str, int] | None = None) -> KeptServer:
        self.manager.receive()
        given = self.manager.kept if inherited is None else inherited
        server = KeptServer(self.directory, *flags, environment=self.manager.environment, inherited=given)
        self._stack.callback(server.close)
        return server

    def filled(self) -> KeptServer:
        """A server with blocks."""
        server = self.start()
        with server.connect() as client:
            client.put_blocks(client.open_namespace(SPEC), RUN, [bytes([nth]) * CHUNK for nth in range(BLOCKS)])
        self.manager.receive()
        assert self.manager.kept.keys() == {ARENA, TABLE}
        return server

    def left(self) -> None:
        """A server with blocks has been killed."""
        server = self.filled()
        server.signal(signal.SIGKILL)
        server.wait()

    def hits(self, server: KeptServer) -> list[bool]:
        with server.connect() as client:
            found = client.lookup(client.open_namespace(SPEC), [RUN], lease=False, prefix_only=False).hits[0]
        print(server.log.read_text())  # Shown where the hits are not what they should be.
        return [bool(found.complete >> nth & 1) for nth in range(BLOCKS)]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(tmp_path, stack)


def test_the_memory_that_the_manager_hands_over_has_its_blocks(rig: Rig) -> None:
    rig.left()
    assert all(rig.hits(rig.start()))


def test_a_server_that_stops_leaves_its_blocks_to_the_next(rig: Rig) -> None:
    server = rig.filled()
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert all(rig.hits(rig.start()))
    assert any("READY=1" in states for states in rig.manager.states)


@pytest.mark.more
def test_tenants_have_their_own_blocks_again_and_no_others(rig: Rig) -> None:
    """Their blocks have equal names."""
    flags: list[str] = []

    def start(*given: str, **_: object) -> KeptServer:
        flags[:] = given
        return rig.start(*given)

    secured = SecuredServer(rig.directory, start)
    callers = {tenant: secured.identity(Role.ENGINE_WRITE, tenant) for tenant in ("acme", "umbra")}
    hits = {"acme": range(12), "umbra": range(4, BLOCKS)}
    runs = {tenant: BlockRun(0, [block_hash(nth) for nth in names]) for tenant, names in hits.items()}
    payloads = {tenant: [tenant[:1].encode() * CHUNK] * len(run) for tenant, run in runs.items()}
    for tenant, caller in callers.items():
        with secured.server.connect(**caller) as client:
            client.put_blocks(client.open_namespace(SPEC), runs[tenant], payloads[tenant])
    secured.server.signal(signal.SIGKILL)
    secured.server.wait()
    after = rig.start(*flags)
    for tenant, other in itertools.permutations(callers):
        with after.connect(**callers[tenant]) as client:
            namespace = client.open_namespace(SPEC)
            found = client.lookup(namespace, [RUN], prefix_only=False)
            assert [nth for nth in range(BLOCKS) if found.hits[0].complete >> nth & 1] == list(hits[tenant])
            got = client.get_blocks(namespace, found.lease_id, runs[tenant])
            assert [bytes(each) for each in got if each is not None] == payloads[tenant]
            others = dataclasses.replace(SPEC, tenant=other)
            with pytest.raises(PermissionDeniedError):
                client.rpc.open_namespace(others)
            with pytest.raises(UnknownNamespaceError):
                client.lookup(dataclasses.replace(namespace, fingerprint=others.fingerprint()), [RUN])


def test_a_data_port_that_is_taken_costs_no_memory_however_often_servers_start(rig: Rig) -> None:
    rig.left()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ("--data-listen", f"127.0.0.1:{taken.getsockname()[1]}")
        for _ in range(MAX_BEGUN):
            refused = rig.start(*flags)
            assert refused.wait() and refused.says("--data-listen")
    assert all(rig.hits(rig.start(*flags)))


def test_memory_of_another_size_has_the_blocks_that_fit(rig: Rig) -> None:
    rig.left()
    for memory in ("16MiB", "16MiB", "8MiB"):
        server = rig.start("--memory", memory)
        with server.connect() as client:
            namespace = client.open_namespace(SPEC)
            found = client.get_blocks(namespace, client.lookup(namespace, [RUN]).lease_id, RUN)
        assert [bytes(block) for block in found if block is not None] == [bytes([nth]) * CHUNK for nth in range(BLOCKS)]
        rig.manager.receive()
        assert rig.manager.kept.keys() == {ARENA, TABLE}
        assert os.fstat(rig.manager.kept[ARENA]).st_size == int(memory.removesuffix("MiB")) * MIB + TRAILER_BYTES
        server.signal(signal.SIGKILL)
        server.wait()


@pytest.mark.more
def test_memory_that_is_too_small_for_its_parts_is_given_up_and_the_manager_told(rig: Rig) -> None:
    rig.left()
    before = dict(rig.manager.kept)
    server = rig.start("--memory", "4MiB")
    assert not any(rig.hits(server))
    assert server.says(GIVEN_UP) and server.says("--memory is not 4 to 512 times 2097152 bytes")
    rig.manager.receive()
    assert rig.manager.kept.keys() == before.keys(), "the new memory is kept in its place"


def test_a_server_that_is_stopped_keeps_its_memory_to_itself(rig: Rig) -> None:
    stopped = rig.filled()
    stopped.signal(signal.SIGSTOP)
    server = rig.start()
    assert not any(rig.hits(server))
    assert server.says(GIVEN_UP) and server.says("still runs")
    stopped.signal(signal.SIGCONT)
    assert all(rig.hits(stopped))


@pytest.mark.more
def test_of_two_servers_that_start_at_once_one_adopts(rig: Rig) -> None:
    rig.left()
    servers = [rig.start(), rig.start()]
    assert sorted(all(rig.hits(server)) for server in servers) == [False, True]


def _flip(fd: int, at: int) -> None:
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)


def test_a_flipped_record_costs_its_block_alone(rig: Rig) -> None:
    rig.left()
    fd = rig.manager.kept[TABLE]
    _flip(fd, os.pread(fd, table.file_bytes(1), 0).index(RUN.block_hashes[5]))
    hits = rig.hits(rig.start())
    assert hits == [nth != 5 for nth in range(BLOCKS)]


@pytest.mark.more
def test_a_flipped_byte_of_a_payload_is_no_hit(rig: Rig) -> None:
    rig.left()
    fd = rig.manager.kept[ARENA]
    _flip(fd, os.pread(fd, 8 << 20, 0).index(bytes([5]) * CHUNK))
    server = rig.start()
    with server.connect() as client:
        namespace = client.open_namespace(SPEC)
        found = client.lookup(namespace, [RUN])
        with pytest.raises(Exception, match="differ from their checksums"):
            client.get_blocks(namespace, found.lease_id, RUN)


def _other_head(fds: dict[str, int]) -> None:
    _flip(fds[TABLE], 9)


def _another_arena(fds: dict[str, int]) -> None:
    size = os.fstat(fds[ARENA]).st_size
    os.close(fds[ARENA])
    fds[ARENA] = sealed_file("other", size)


def _unsealed_arena(fds: dict[str, int]) -> None:
    size = os.fstat(fds[ARENA]).st_size
    os.close(fds[ARENA])
    fds[ARENA] = os.memfd_create("unsealed")
    os.ftruncate(fds[ARENA], size)


def _a_short_table(fds: dict[str, int]) -> None:
    head = os.pread(fds[TABLE], 4_096, 0)
    os.close(fds[TABLE])
    fds[TABLE] = sealed_file("short", 4_096)
    os.pwrite(fds[TABLE], head, 0)


def _no_table(fds: dict[str, int]) -> None:
    os.close(fds.pop(TABLE))


def _something_else(fds: dict[str, int]) -> None:
    fds["other"] = os.open("/dev/null", os.O_RDONLY)


@pytest.mark.more
@pytest.mark.parametrize(
    "forge", [_other_head, _another_arena, _unsealed_arena, _a_short_table, _no_table, _something_else]
)
def test_what_is_not_the_memory_of_a_server_is_given_up(rig: Rig, forge: Callable[[dict[str, int]], None]) -> None:
    rig.left()
    forge(rig.manager.kept)
    server = rig.start()
    assert not any(rig.hits(server))
    assert server.says(GIVEN_UP)


@pytest.mark.more
def test_a_table_of_another_release_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.left()
    fd = rig.manager.kept[TABLE]
    geometry = head.geometry_of(fd)
    assert geometry is not None
    monkeypatch.setattr(head, "FORMAT", head.FORMAT + 1)
    later = table.SlotTable.create(geometry)
    os.pwrite(fd, os.pread(later.fd, table.HEAD_BYTES, 0), 0)
    later.close()
    server = rig.start()
    assert not any(rig.hits(server))
    assert server.says("its table is of another release")


@pytest.mark.more
def test_a_server_that_keeps_nothing_does_not_take_what_there_is(rig: Rig) -> None:
    rig.left()
    server = rig.start("--keep", "no")
    assert not any(rig.hits(server))


def test_descriptors_for_another_process_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_FDNAMES", ARENA)
    monkeypatch.setenv("LISTEN_PID", "1")
    assert store.take() == {}
    assert "LISTEN_FDS" not in os.environ


@pytest.mark.more
def test_a_process_of_the_last_server_is_waited_for(rig: Rig) -> None:
    """As a data worker would be that is slow to end, and holds this lock (`Segment.hold`)."""
    server = rig.filled()
    worker = next(
        each for each in children_of(server.pid) if b"data_plane" in Path(f"/proc/{each}/cmdline").read_bytes()
    )
    wait_for(lambda: re.search(rf"POSIX .* READ +{worker} ", Path("/proc/locks").read_text()), "the worker's lock")
    server.signal(signal.SIGKILL)
    server.wait()
    wait_for(lambda: not Path(f"/proc/{worker}").exists(), "the worker's end")
    fcntl.lockf(rig.manager.kept[ARENA], fcntl.LOCK_SH, 1, 1)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(rig.hits, rig.start())
        time.sleep(2.0)
        assert not waiting.done()
        fcntl.lockf(rig.manager.kept[ARENA], fcntl.LOCK_UN, 1, 1)
        assert all(waiting.result(20.0))
