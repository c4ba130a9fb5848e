"""Transfers over connections on which anything may happen at any byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvpool.protocol.errors import KVPoolError, LeaseExpiredError, PoolTimeoutError, UnavailableError
from kvpool.transport import tcp_transfer
from kvpool.transport.base import Buffers, Bytes, Local, Pieces, Transfer
from kvpool.transport.data_port import Kind, Status
from kvpool.transport.helpers import UNIT_BYTES, Helpers, Staging
from kvpool.transport.tcp import TcpRead, TcpWrite
from kvpool.transport.tcp_connection import Peer
from kvpool.transport.tcp_transfer import ConnectionPool
from tests.support.effort import effort
from tests.support.processes import wait_for
from tests.support.scripted_port import GREETINGS, HONEST, Act, Does, ScriptedPort, scripted_port
from tests.support.values import payload
from tests.support.workers import data_port

MIB = 1 << 20
STALL_S, DEADLINE_S, SLACK_S = 0.15, 0.4, 10.0
"""A transfer that waited in vain would outlast its deadline by more than SLACK_S: peers stand still for 20 s."""
AMPLE_S = 30.0
MARK = 0xEE


class UnheardError(Exception):
    """No library would raise this."""


@dataclass(frozen=True)
class Case:
    """One transfer, and what its callbacks and its connections do.

    Args:
        part_bytes: of `tcp_transfer.PART_BYTES`.
        is_summed: whether threads sum what they move; always for a write.
        fails_at: the region at which a callback raises.
        waits: of batches, by their number: the callback returns a function that waits so many seconds.
    """

    num_connections: int
    num_regions: int
    region_bytes: int
    batch_bytes: int
    part_bytes: int
    staging_units: int
    is_write: bool
    is_summed: bool
    num_pieces: int
    waits: dict[int, float]
    fails_at: int | None
    scripts: list[list[Act]]

    @property
    def in_place(self) -> bool:
        return self.num_pieces > 0

    @property
    def is_honest(self) -> bool:
        """Whether nothing but the callback can fail; delays are shorter than the stall timeout."""
        return all(act.does in (Does.SERVE, Does.TRICKLE) for script in self.scripts for act in script)


def acts(does: Sequence[Does]) -> st.SearchStrategy[Act]:
    return st.builds(
        Act,
        st.sampled_from(does),
        at=st.floats(0, 1),
        delay_s=st.sampled_from([0.0, 0.0, 0.001, 0.002]),
        status=st.sampled_from([Status.INVALID, Status.REFUSED, Status.EXPIRED, Status.BUSY]),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    region_bytes = draw(st.sampled_from([1, 7, 4_096, 100_003, MIB, 3 * MIB]))
    # Most of them go well: else few would come far.
    faulty = [Does.SERVE] * 8 + [*Does]
    moves = draw(st.sampled_from([[Does.SERVE], [Does.SERVE, Does.TRICKLE], faulty, faulty]))
    greeting = st.just(HONEST) if draw(st.integers(0, 3)) else acts(GREETINGS)
    script = st.tuples(greeting, st.lists(acts(moves), max_size=12)).map(lambda both: [both[0], *both[1]])
    is_write = draw(st.booleans())
    return Case(
        num_connections=draw(st.integers(1, 4)),
        num_regions=draw(st.integers(1, min(40, max(3, 12 * MIB // region_bytes)))),
        region_bytes=region_bytes,
        batch_bytes=draw(st.sampled_from([1, 3 * region_bytes, 10 * region_bytes, 2 * MIB])),
        part_bytes=draw(st.sampled_from([1, 2 * region_bytes, 2 * MIB])),
        staging_units=draw(st.integers(1, 6)),
        is_write=is_write,
        is_summed=is_write or draw(st.booleans()),
        num_pieces=draw(st.sampled_from([0, 0, 1, 3])),
        waits=draw(st.dictionaries(st.integers(0, 12), st.sampled_from([0.0, 0.001, 0.01]), max_size=12)),
        fails_at=draw(st.none() | st.none() | st.integers(0, 39)),
        scripts=draw(st.lists(script, min_size=0 if moves == [Does.SERVE] else 2, max_size=4)),
    )


class Attempt:
    """A case that is tried, with what its callbacks saw.

    Attributes:
        copies: threads that fill or look at buffers after the callback has returned, as a GPU does.
    """

    def __init__(self, case: Case, port: ScriptedPort):
        self.case = case
        self.port = port
        self.staging = Staging(case.staging_units * UNIT_BYTES)
        deadline_s = AMPLE_S if case.is_honest else DEADLINE_S
        self.peer = port.peer(AMPLE_S) if case.is_honest else port.peer(STALL_S)
        self.connections = ConnectionPool(self.peer, case.num_connections + 1)
        self.helpers = Helpers(case.num_connections - 1)
        offsets = [nth * case.region_bytes + nth // 2 * 8 for nth in range(case.num_regions)]
        self.transfer = Transfer(1, offsets, case.region_bytes, deadline_s, case.batch_bytes, bytes(24))
        self.expected = [payload(nth, case.region_bytes) for nth in range(case.num_regions)]
        self.num_calls = 0
        self.seen: list[int] = []
        self.drained: dict[int, bytes] = {}
        self.summed: dict[int, bytes] = {}
        self.copies: list[threading.Thread] = []
        self.broken: list[str] = []
        blank = np.zeros if not case.is_write else np.copy
        self.arrays = [
            np.array_split(each.copy() if case.is_write else blank(len(each), np.uint8), max(1, case.num_pieces))
            for each in self.expected
        ]
        if not case.is_write:
            for offset, each in zip(offsets, self.expected, strict=True):
                port.arena[offset : offset + len(each)] = each

    def run(self) -> None:
        case, rows = self.case, self.arrays if self.case.in_place else None
        act = None if rows else self._call_back
        if case.is_write:
            TcpWrite(self.transfer, Local(act, rows, self._sum), self.connections, self.helpers).run(self.staging)
        else:
            sink = Local(act, rows, self._sum) if case.is_summed else Local(act, rows)
            TcpRead(self.transfer, sink, self.connections, self.helpers).run(self.staging)

    def _call_back(self, first: int, buffers: Buffers) -> Callable[[], object] | None:
        """Fills buffers or looks at them, at once or as a GPU does."""
        regions = range(first, first + len(buffers))
        wait_s = self.case.waits.get(self.num_calls)
        self.num_calls += 1
        self.seen += regions
        if self.case.fails_at in regions:
            raise UnheardError

        def copy() -> None:
            time.sleep(wait_s or 0.0)
            for idx, buffer in zip(regions, buffers, strict=True):
                if self.case.is_write:
                    buffer[:] = self.expected[idx]
                else:
                    self.drained[idx] = buffer.tobytes()

        if wait_s is None:
            copy()
            return None
        self.copies.append(threading.Thread(target=copy))
        self.copies[-1].start()
        return self.copies[-1].join

    def _sum(self, first: int, regions: Sequence[Pieces]) -> None:
        for idx, pieces in enumerate(regions, first):
            found = np.concatenate(pieces).tobytes()
            if self.summed.setdefault(idx, found) is not found:
                self.broken.append(f"region {idx} was summed twice")

    def check_success(self) -> None:
        case, every = self.case, {idx: each.tobytes() for idx, each in enumerate(self.expected)}
        assert self.summed == (every if case.is_summed else {})
        assert case.in_place or self.seen == list(range(case.num_regions))
        if case.is_write:
            for offset, each in zip(self.transfer.offsets, self.expected, strict=True):
                assert np.array_equal(self.port.arena[offset : offset + len(each)], each)
        elif case.in_place:
            assert {idx: np.concatenate(pieces).tobytes() for idx, pieces in enumerate(self.arrays)} == every
        else:
            assert self.drained == every

    def check_nothing_goes_on(self) -> None:
        """Memory that passes to somebody else stays theirs, whatever arrives, and all of it has come back."""
        summed = dict(self.summed)
        assert not any(copy.is_alive() for copy in self.copies), "a copy uses buffers of the staging memory"
        with self.staging.borrowed(self.case.staging_units * UNIT_BYTES, 1, 0.0) as (memory,):
            mine = [memory[: 4 * UNIT_BYTES], *(piece for pieces in self.arrays for piece in pieces)]
            for each in mine:
                each[:] = MARK
            self.port.resume.set()
            self._check_idle()
            assert all((each == MARK).all() for each in mine), "somebody wrote there"
        assert self.summed == summed and not self.broken

    def _check_idle(self) -> None:
        together = threading.Barrier(self.case.num_connections, timeout=10)
        self.helpers.share(range(self.case.num_connections), lambda _: together.wait())
        connections = [self.connections.acquire(0.0) for _ in range(self.case.num_connections + 1)]
        for connection in connections:
            self.connections.release(connection)

    def check_that_the_next_goes_well(self) -> None:
        arena = self.port.arena
        arena[:64] = 7
        transfer = Transfer(2, [0], 64, AMPLE_S, MIB, bytes(24))
        row = np.zeros(64, np.uint8)
        TcpRead(transfer, Local(rows=[[row]]), self.connections, self.helpers).run(self.staging)
        assert (row == 7).all()


@settings(max_examples=effort(60))
@given(cases())
def test_a_transfer_ends_well_or_with_an_error_in_time_and_leaves_nothing_behind(case: Case) -> None:
    nbytes = case.num_regions * (case.region_bytes + 8)
    with ExitStack() as stack:
        port = stack.enter_context(scripted_port(*case.scripts, nbytes=max(nbytes, 64)))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(tcp_transfer, "PART_BYTES", (case.part_bytes, 4 * case.part_bytes))
        attempt = Attempt(case, port)
        stack.callback(attempt.helpers.close)
        stack.callback(attempt.connections.close)
        started, error = time.monotonic(), None
        try:
            attempt.run()
        except (KVPoolError, UnheardError) as raised:
            error = raised
        event(f"{case.is_write=} {case.in_place=} {type(error).__name__}")
        assert time.monotonic() - started < attempt.transfer.timeout_s + SLACK_S
        arena = port.arena.copy()
        assert attempt.seen == list(range(len(attempt.seen)))
        if error is None:
            assert case.in_place or case.fails_at is None or case.fails_at >= case.num_regions
            attempt.check_success()
        elif case.is_honest:
            assert type(error) is UnheardError
        attempt.check_nothing_goes_on()
        if case.is_honest:
            assert np.array_equal(port.arena, arena), "bytes of the write were in flight"
            attempt.check_that_the_next_goes_well()


class Moves:
    """Reads and writes at a scripted port, with or without helpers."""

    def __init__(self, peer: Peer, num_helpers: int = 0):
        self.connections, self.helpers, self.staging = ConnectionPool(peer, 4), Helpers(num_helpers), Staging(8 * MIB)

    def write(self, source: Local, offsets: Sequence[int] = (0,), timeout_s: float = AMPLE_S) -> None:
        transfer = Transfer(1, offsets, 64, timeout_s, 64, bytes(24))
        TcpWrite(transfer, source, self.connections, self.helpers).run(self.staging)

    def read(self, sink: Local, offsets: Sequence[int] = (0,), timeout_s: float = AMPLE_S) -> None:
        transfer = Transfer(1, offsets, 64, timeout_s, 64, bytes(24))
        TcpRead(transfer, sink, self.connections, self.helpers).run(self.staging)

    def close(self) -> None:
        self.connections.close()
        self.helpers.close()


@contextmanager
def moves(*scripts: Sequence[Act], num_helpers: int = 0) -> Iterator[tuple[Moves, ScriptedPort]]:
    with scripted_port(*scripts) as port, closing(Moves(port.peer(AMPLE_S), num_helpers)) as moves:
        yield moves, port


def row() -> list[Bytes]:
    return [np.zeros(64, np.uint8)]


SLOW = Act(Does.TRICKLE, delay_s=0.4)


@pytest.mark.parametrize(
    "move",
    [
        lambda transport: transport.write(Local(rows=[row()]), timeout_s=0.35),
        lambda transport: transport.read(Local(rows=[row()]), timeout_s=0.35),
    ],
    ids=["write", "read"],
)
@pytest.mark.parametrize(
    "script",
    [[SLOW], [HONEST, SLOW], [HONEST, Act(Does.REFUSE, 1.0, delay_s=0.4)]],
    ids=["the greeting", "the reply", "an error's message"],
)
def test_a_peer_that_sends_a_byte_now_and_then_does_not_outlast_the_deadline(
    script: list[Act], move: Callable[[Moves], None]
) -> None:
    with moves(script) as (transport, _):
        started = time.monotonic()
        with pytest.raises((PoolTimeoutError, UnavailableError)):
            move(transport)
        assert time.monotonic() - started < SLACK_S


def test_what_a_data_port_says_can_be_printed() -> None:
    with (
        moves([HONEST, Act(Does.REFUSE, 1.0)]) as (transport, _),
        pytest.raises(LeaseExpiredError, match=r"\[31m") as raised,
    ):
        transport.read(Local(rows=[row()]))
    assert str(raised.value).isprintable()


def test_bytes_that_are_still_being_filled_when_a_write_fails_are_waited_for() -> None:
    """Their buffers are another transfer's next."""
    done: list[int] = []
    ended = threading.Event()

    def fill(first: int, buffers: Buffers) -> Callable[[], object]:
        if first == 2:
            assert not done
            raise UnheardError
        return lambda: done.append(first)

    with moves(num_helpers=1) as (transport, _):
        transport.helpers.submit(ended.wait)  # Nothing is sent before the failure.
        with pytest.raises(UnheardError):
            transport.write(Local(fill), [0, 64, 128])
        ended.set()
    assert done == [0, 1]


def test_what_is_filled_late_is_sent_once_it_is_there() -> None:
    def fill(first: int, buffers: Buffers) -> Callable[[], object]:
        def wait() -> None:
            for buffer in buffers:
                buffer[:] = 7

        return wait

    with moves() as (transport, port):
        transport.write(Local(fill), [0, 64, 128])
        assert (port.arena[:192] == 7).all()


def test_a_drain_that_fails_late_leaves_no_other_under_way() -> None:
    done: list[int] = []

    def drain(first: int, buffers: Buffers) -> Callable[[], object]:
        def wait() -> None:
            done.append(first)
            if first == 0:
                raise UnheardError

        return wait

    with moves() as (transport, _), pytest.raises(UnheardError):
        transport.read(Local(drain), [0, 64, 128])
    assert done == [0, 1]


def test_a_helper_that_gets_no_connection_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_transfer, "PART_BYTES", (64, 64))
    with moves([HONEST], [Act(Does.STALL)], num_helpers=1) as (transport, port):
        connected = threading.Event()
        transport.helpers.submit(connected.wait)  # The first connection is the caller's.

        def sum_regions(first: int, regions: Sequence[Pieces]) -> None:
            connected.set()
            wait_for(lambda: port.num_connections == 2, "the helper to connect")

        started = time.monotonic()
        transport.read(Local(rows=[row(), row()], sum=sum_regions), [0, 64])
        assert time.monotonic() - started < SLACK_S


def test_a_connection_that_nobody_needed_is_kept_for_the_next() -> None:
    with scripted_port() as port, closing(ConnectionPool(port.peer(), 1)) as connections:
        for _ in range(2):
            connection = connections.acquire(0.0)
            connection.open(time.monotonic() + AMPLE_S)
            connections.release(connection)
        assert port.num_connections == 1


def test_why_a_worker_hung_up_is_told_although_bytes_were_on_their_way() -> None:
    """More of them than a worker reads on."""
    region_bytes = 160 * MIB
    with data_port(region_bytes) as port, closing(port.connect(1)) as transport:
        permit = port.permit(Kind.WRITE, 1, [0], region_bytes, ttl_s=0)
        rows = [[np.zeros(region_bytes, np.uint8)]]
        with pytest.raises(LeaseExpiredError, match="has expired"):
            transport.write(Transfer(1, [0], region_bytes, AMPLE_S, MIB, permit), Local(rows=rows))
