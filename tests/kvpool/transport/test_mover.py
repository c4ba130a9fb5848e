"""Transfers in a process of their own: the contract, and a process that is late, hangs, dies, or outlives nobody."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from kvpool.protocol.errors import ConfigError, LeaseExpiredError, PoolTimeoutError, TransferError, UnavailableError
from kvpool.transport import child_process
from kvpool.transport import mover as module
from kvpool.transport.base import Buffers, Local, Transfer
from kvpool.transport.chunk_sums import ChunkSums, sums_of
from kvpool.transport.data_port import Kind
from kvpool.transport.helpers import STAGING_BYTES
from kvpool.transport.mover import MAX_PEERS, MEMORY_BYTES, MOVERS, Movers
from kvpool.transport.segment import Segment
from kvpool.transport.tcp import TcpTransport
from tests.contracts.transport_contract import DEADLINE_S, REGION_BYTES, Regions, Rig, TransportContract
from tests.support.processes import is_running, wait_for
from tests.support.scripted_port import scripted_port
from tests.support.workers import NOWHERE, Permitted, Port, data_port, wait_for_mover

MIB = 1 << 20


class Apart:
    """Movers as a transport. Transfers that no process takes are this process's, as with `TcpTransport`."""

    name, one_sided = "tcp", False

    def __init__(self, port: Port, num_connections: int):
        self.movers, self.peer = Movers(num_connections), port.peer()
        self._here = port.connect(1)
        self.memory = self.movers.memory
        self.num_left = 0
        self.pid = wait_for_mover(self.movers)

    def write(self, transfer: Transfer, source: Local) -> None:
        if not self.movers.move(self.peer, transfer, source, is_write=True):
            self.num_left += source.act is not None
            self._here.write(transfer, source)

    def read(self, transfer: Transfer, sink: Local) -> None:
        if not self.movers.move(self.peer, transfer, sink, is_write=False):
            self.num_left += sink.act is not None
            self._here.read(transfer, sink)

    def close(self) -> None:
        self.movers.close()
        self._here.close()


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "sealed"])
def port(request: pytest.FixtureRequest) -> Iterator[Port]:
    with data_port(sealed=request.param) as port:
        yield port


@pytest.fixture(scope="module")
def apart(port: Port) -> Iterator[Apart]:
    with closing(Apart(port, 3)) as apart:
        yield apart


class TestContract(TransportContract):
    @pytest.fixture
    def rig(self, port: Port, apart: Apart, request: pytest.FixtureRequest) -> Iterator[Rig]:
        def regions(num_regions: int, region_bytes: int) -> Regions:
            start = next(AT) % 8 * 4 * MIB if num_regions * region_bytes < 3 * MIB else 40 * MIB
            offsets = tuple(start + nth * region_bytes + nth // 2 * 8 for nth in range(num_regions))
            return Regions(next(IDS), offsets, lambda: next(IDS))

        apart.num_left = 0
        yield Rig(Permitted(apart, port), regions)
        assert not apart.num_left or "threads" in request.node.name, "this process has moved the bytes"

    def test_close_is_idempotent(self, port: Port) -> None:
        apart = Apart(port, 1)
        apart.close()
        apart.close()
        assert not is_running(apart.pid)


AT, IDS = itertools.count(), itertools.count(1)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Apart, Port]]:
    """Movers for one test, which lose patience early."""
    monkeypatch.setattr(module, "LATE_S", 0.3)
    with data_port() as port, closing(Apart(port, 2)) as apart:
        yield apart, port


def write(apart: Apart, port: Port, fill: object, timeout_s: float = DEADLINE_S, count: int = 4) -> bool:
    """Whether the process took a write of some regions, one a batch."""
    offsets = [nth * REGION_BYTES for nth in range(count)]
    permit = port.permit(Kind.WRITE, 1, offsets, REGION_BYTES)
    return apart.movers.move(
        apart.peer, Transfer(1, offsets, REGION_BYTES, timeout_s, 1, permit), Local(fill), is_write=True
    )


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_hangs_fails_its_transfers_and_is_started_again(
    own: tuple[Apart, Port], sent: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, port = own
    began = time.monotonic()
    with pytest.raises(TransferError if sent is signal.SIGKILL else PoolTimeoutError, match=r"has ended|hung"):
        write(apart, port, lambda first, buffers: os.kill(apart.pid, sent), timeout_s=0.5)
    assert time.monotonic() - began < 5 and not is_running(apart.pid)
    assert not write(apart, port, lambda first, buffers: None), "the next must not wait for a new process"
    apart.movers._start_at = 0.0  # As after START_AGAIN_S.
    assert wait_for_mover(apart.movers) != apart.pid
    assert write(apart, port, lambda first, buffers: None)


def test_a_transfer_has_all_connections() -> None:
    with scripted_port(nbytes=24 * MIB) as port, closing(Movers(3)) as movers:
        wait_for_mover(movers)
        transfer = Transfer(1, range(0, 24 * MIB, MIB), MIB, DEADLINE_S, MIB, bytes(24))

        def drain(first: int, buffers: Buffers) -> None:
            wait_for(lambda: port.num_connections == 3, "all connections")

        assert movers.move(port.peer(), transfer, Local(drain), is_write=False)


def test_others_go_on_beside_a_full_process(own: tuple[Apart, Port]) -> None:
    apart, port = own
    busy, go_on = threading.Barrier(MOVERS + 1), threading.Event()

    def fill(first: int, buffers: Buffers) -> None:
        if not first:
            busy.wait(10)
            go_on.wait(10)

    def take() -> None:
        wait_for(lambda: write(apart, port, fill), "a process")

    threads = [threading.Thread(target=take) for _ in range(MOVERS)]
    for thread in threads:
        thread.start()
    busy.wait(10)
    assert not write(apart, port, lambda first, buffers: None)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert write(apart, port, lambda first, buffers: None)
    assert sorted(mover.nth for mover in apart.movers._idle) == list(range(MOVERS)), "two processes share memory"


def test_closing_ends_transfers_under_way(own: tuple[Apart, Port]) -> None:
    apart, port = own
    with pytest.raises(TransferError, match="has ended"):
        write(apart, port, lambda first, buffers: apart.movers.close())
    assert not is_running(apart.pid)
    assert not write(apart, port, lambda first, buffers: None)


@pytest.fixture
def arena() -> Iterator[Segment]:
    with closing(Segment.create(MIB)) as arena:
        yield arena


def test_a_servers_process_reads_into_its_arena_and_sums(port: Port, arena: Segment) -> None:
    chunk, count = REGION_BYTES // 4, 40
    port.arena[:MIB] = np.random.default_rng(1).integers(0, 256, MIB, np.uint8)
    offsets = [nth * 2 * REGION_BYTES for nth in range(count)]
    rows = [[arena.bytes[nth * REGION_BYTES :][:REGION_BYTES]] for nth in reversed(range(count))]
    permit = port.permit(Kind.READ, 1, offsets, REGION_BYTES)
    sums = ChunkSums(count, REGION_BYTES, chunk)
    with closing(Movers(3, arena)) as movers:
        wait_for_mover(movers)
        transfer = Transfer(1, offsets, REGION_BYTES, DEADLINE_S, permit=permit)
        assert movers.move(port.peer(), transfer, Local(rows=rows, sum=here), sums=sums)
    expected = [port.arena[at : at + REGION_BYTES] for at in offsets]
    assert all(np.array_equal(row, one) for (row,), one in zip(rows, expected, strict=True))
    assert sums.all() == [each for region in expected for each in sums_of([region], chunk)]


def here(first: int, regions: object) -> None:
    pytest.fail("this process has summed the rows")


def test_a_process_that_is_killed_reads_nothing_into_the_arena_later(arena: Segment) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, closing(Movers(1, arena)) as movers:
        pid = wait_for_mover(movers)
        peer = module.Peer("127.0.0.1", silent.getsockname()[1], b"n" * 16, DEADLINE_S)
        transfer, local = Transfer(1, [0], 64, DEADLINE_S, permit=bytes(24)), Local(rows=[[arena.bytes[:64]]])
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(TransferError, match="has ended"):
            movers.move(peer, transfer, local, sums=ChunkSums(1, 64, 64))
        assert not is_running(pid), "the slots are another block's from now on"


def test_a_process_keeps_a_connection_to_each_server_that_a_server_reads_from(arena: Segment) -> None:
    with ExitStack() as stack:
        ports = [stack.enter_context(scripted_port()) for _ in range(MAX_PEERS)]
        movers = stack.enter_context(closing(Movers(1, arena)))
        wait_for_mover(movers)
        for port in [*ports, *ports]:
            transfer, sums = Transfer(1, [0], 64, DEADLINE_S, permit=bytes(24)), ChunkSums(1, 64, 64)
            assert movers.move(port.peer(), transfer, Local(rows=[[arena.bytes[:64]]]), sums=sums)
        assert {port.num_connections for port in ports} == {1}


def test_what_the_process_meets_reaches_the_caller(own: tuple[Apart, Port]) -> None:
    apart, port = own
    expired = Transfer(1, [0], 64, DEADLINE_S, 64, port.permit(Kind.READ, 1, [0], 64, ttl_s=0))
    with pytest.raises(LeaseExpiredError, match="has expired"):
        apart.movers.move(apart.peer, expired, Local(lambda first, buffers: None), is_write=False)
    with pytest.raises(KeyboardInterrupt):
        write(apart, port, interrupt)
    assert not is_running(apart.pid), "it may still write into the buffers"
    with closing(Movers(1)) as gone:
        wait_for_mover(gone)
        with pytest.raises(UnavailableError, match="cannot reach the data port"):
            gone.move(NOWHERE, expired, Local(lambda first, buffers: None), is_write=False)


def interrupt(first: int, buffers: Buffers) -> None:
    raise KeyboardInterrupt


def test_what_does_not_fit_the_shared_memory_stays_here_and_so_does_a_forks(own: tuple[Apart, Port]) -> None:
    apart, port = own
    transfer = Transfer(1, [0], MEMORY_BYTES + 1, DEADLINE_S)
    assert not apart.movers.move(apart.peer, transfer, Local(lambda first, buffers: None), is_write=True)
    if not (pid := os.fork()):
        os._exit(write(apart, port, lambda first, buffers: None))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert write(apart, port, lambda first, buffers: None)


def test_a_process_that_has_ended_while_idle_takes_no_transfer(own: tuple[Apart, Port]) -> None:
    apart, port = own
    os.kill(apart.pid, signal.SIGKILL)
    wait_for(lambda: not is_running(apart.pid), "its end")
    assert not write(apart, port, lambda first, buffers: None)


def test_without_shared_memory_all_bytes_move_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(module.Segment, "create", refuse)
        transport = TcpTransport(module.Peer("127.0.0.1", 1, b"n" * 16, 1.0), 1)
    with closing(transport):
        assert "no memory (seccomp)" in caplog.text and transport.memory.nbytes == STAGING_BYTES
        apart = Transfer(1, (), 64, DEADLINE_S, out_of_process=True)
        transport.write(apart, Local(lambda first, buffers: None))
        assert not transport._movers._movers


def refuse(nbytes: int) -> None:
    raise ConfigError("no memory (seccomp)")


@pytest.mark.parametrize(
    ("executable", "why"), [("/bin/false", "it has ended"), ("/no/such/file", "No such file or directory")]
)
def test_a_process_that_does_not_start_is_told_once(
    executable: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_process.sys, "executable", executable)
    monkeypatch.setattr(module, "START_AGAIN_S", 0.0)
    with closing(Movers(1)) as movers:
        nothing = NOWHERE, Transfer(1, (), 64, DEADLINE_S), Local(lambda first, buffers: None)
        assert not movers.move(*nothing, is_write=True)
        wait_for(lambda: caplog.records, "a warning")
        for _ in range(3):
            wait_for(lambda: not movers._movers, "the end of a start")
            assert not movers.move(*nothing, is_write=True)
        assert len(caplog.records) == 1 and "this process moves them" in caplog.text and why in caplog.text


def test_closing_ends_a_process_that_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script, told = tmp_path / "python", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\necho $$ > {told}\nexec sleep 60\n")
    script.chmod(0o700)
    monkeypatch.setattr(child_process.sys, "executable", str(script))
    with closing(Movers(1)) as movers:
        nothing = NOWHERE, Transfer(1, (), 64, DEADLINE_S), Local(lambda first, buffers: None)
        assert not movers.move(*nothing, is_write=True)
        wait_for(lambda: told.exists() and told.read_text(), "the process")
    wait_for(lambda: not is_running(int(told.read_text())), "its end")
