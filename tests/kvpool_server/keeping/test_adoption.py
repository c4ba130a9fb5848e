"""What a server makes of the descriptors that its service manager hands it, whatever they are."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvpool.protocol.types import BlockRun
from kvpool.transport.segment import TRAILER_BYTES, Segment, sealed_file
from kvpool_server.keeping import store, table
from kvpool_server.keeping.adoption import ARENA, MAX_BEGUN, KeptMemory
from kvpool_server.keeping.table import TABLE, Geometry, SlotTable
from tests.support.kept_server import KeptServer, Manager, children_of
from tests.support.processes import wait_for
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


def test_a_server_that_stops_leaves_its_blocks_to_the_next(rig: Rig) -> None:
    server = rig.filled()
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert all(rig.hits(rig.start()))
    assert any("READY=1" in states for states in rig.manager.states)


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
    for memory in ("16MiB", "8MiB"):
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


@pytest.fixture
def fds() -> Iterator[dict[str, int]]:
    """What a manager has kept of a server: the descriptors of an arena of 8 MiB and of its table."""
    segment = Segment.create(8 * MIB)
    geometry = Geometry(8 * MIB, 2 * MIB, False, segment.nonce, segment.token)
    with closing(segment), closing(SlotTable.create(geometry)) as made:
        yield {ARENA: os.dup(segment.fd), TABLE: os.dup(made.fd)}


def _replace(fds: dict[str, int], name: str, fd: int) -> None:
    os.close(fds[name])
    fds[name] = fd


def _unsealed_arena(fds: dict[str, int]) -> None:
    _replace(fds, ARENA, os.memfd_create("unsealed"))
    os.ftruncate(fds[ARENA], 8 * MIB + TRAILER_BYTES)


def _short_table(fds: dict[str, int]) -> None:
    before = os.pread(fds[TABLE], 4_096, 0)
    _replace(fds, TABLE, sealed_file("short", 4_096))
    os.pwrite(fds[TABLE], before, 0)


def _table_of_another_release(fds: dict[str, int]) -> None:
    geometry = table.geometry_of(fds[TABLE])
    assert geometry is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "FORMAT", table.FORMAT + 1)
        with closing(SlotTable.create(geometry)) as later:
            os.pwrite(fds[TABLE], os.pread(later.fd, table.HEAD_BYTES, 0), 0)


def _nothing(fds: dict[str, int]) -> None:
    """The memory is as it was."""


@pytest.mark.parametrize(
    ("forge", "settings", "why"),
    [
        (lambda fds: _flip(fds[TABLE], 9), {}, "its table is of another release"),
        (_table_of_another_release, {}, "its table is of another release"),
        (
            lambda fds: _replace(fds, ARENA, sealed_file("other", 8 * MIB + TRAILER_BYTES)),
            {},
            "another server's memory",
        ),
        (
            lambda fds: _replace(fds, ARENA, sealed_file("other", 4 * MIB)),
            {},
            "memory of another size than it announced",
        ),
        (_unsealed_arena, {}, "no memory whose size is sealed"),
        (_short_table, {}, "its table has another size"),
        (lambda fds: os.close(fds.pop(TABLE)), {}, "it is not one arena and one table"),
        (lambda fds: fds.update(other=os.open("/dev/null", os.O_RDONLY)), {}, "it is not one arena and one table"),
        (
            lambda fds: os.pwrite(fds[TABLE], table.CHECK.pack(MAX_BEGUN), table.BEGUN_AT),
            {},
            "2 servers have not got over its adoption",
        ),
        (_nothing, {"nbytes": 4 * MIB}, "--memory is not 4 to 512 times 2097152 bytes"),
        (_nothing, {"has_tenants": True}, "TLS was off"),
        (_nothing, {"is_kept": False}, "--keep no"),
    ],
)
def test_what_is_not_the_memory_of_such_a_server_is_given_up_and_the_manager_told(
    fds: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    forge: Callable[[dict[str, int]], object],
    settings: dict[str, int],
    why: str,
) -> None:
    forge(fds)
    removed: list[str] = []
    monkeypatch.setattr(store, "take", lambda: {name: [fd] for name, fd in fds.items()})
    monkeypatch.setattr(store, "remove", removed.append)
    with capture_logs() as logs:
        kept = KeptMemory(**{"nbytes": 8 * MIB, "has_tenants": False, "is_kept": True, **settings})
        assert asyncio.run(kept.take()) is None
    assert [line["reason"].partition(" (")[0] for line in logs] == [why]
    assert kept.extent_bytes is None and removed == list(fds)
    for fd in fds.values():
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


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
