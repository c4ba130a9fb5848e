"""The `mooncake` transport: one-sided reads and writes of the arena by Mooncake's Transfer Engine, over RDMA or TCP.

The server takes no part in a transfer, so it cannot check that a lease or a ticket is live. Three rules guard the
bytes, as in shared memory. The client asks for a lease or ticket just before a transfer, starts and hands over no batch
after `timeout_s`, and discards what it has read if the lease has ended meanwhile. The server keeps the slots of an
expired ticket in quarantine for `grace_ms`. Behind both are the checksums.

Nothing can stop an engine transfer. So the ticket of a failed write is never revoked (`one_sided`), and buffers of a
call that gave up are lent again only once all engine transfers of the call have ended.

Threads: a call submits and polls its engine transfers on its own thread; the engine moves the bytes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from kvpool.errors import KVPoolError, PoolTimeoutError, TransferError, UnavailableError
from kvpool.mooncake import Engine, State
from kvpool.transport.base import Bytes, Clock, Sink, Source, Transfer
from kvpool.transport.staging import Staging
from kvpool.types import MooncakeInfo

DEPTH = 2
"""Batches of one call under way: one travels while the caller fills or drains the other."""
STAGING_BYTES = 64 << 20
"""Memory that is registered with the client's engine, and lent to calls."""
WINDOW = 64
"""Engine transfers that a call has in flight; an engine queues about 2,000 for a peer, and fails the others."""
MAX_SPAN_BYTES = 1 << 20
"""Neighbouring regions travel as one engine transfer of at most so many bytes."""
POLL_S = (20e-6, 20e-3)
"""Shortest and longest sleep between two looks at engine transfers; between them, an eighth of the wait so far."""


class MooncakeTransport:
    """Regions of an arena that the server's Transfer Engine has registered.

    Args:
        info: the server's engine; also an attribute.
        engine: the client's own.
        stall_timeout_s: a read that receives nothing for so long fails.

    Raises TransferError if the engine cannot register memory.
    """

    name = "mooncake"
    memory = None
    one_sided = True

    def __init__(self, info: MooncakeInfo, engine: Engine, stall_timeout_s: float, clock: Clock = time.monotonic):
        self.info = info
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._staging = Staging(STAGING_BYTES)
        engine.register(self._staging.memory)
        self._engine: Engine | None = engine
        self._given_up: list[tuple[_Call, ExitStack]] = []

    def __repr__(self) -> str:
        return f"MooncakeTransport({self.info.session}, {self.info.protocol})"

    def prove(self, timeout_s: float) -> None:
        """Reads the server's nonce through the engine.

        Raises as `read`, and TransferError for another server.
        """
        read: Future[bytes] = Future()
        transfer = Transfer(0, [self.info.nonce_offset], len(self.info.nonce), timeout_s)

        def work() -> None:
            try:
                self._read(transfer, Sink(lambda _, rows: read.set_result(rows[0].tobytes())), math.inf)
            except Exception as error:
                read.set_exception(error)

        # The engine's first contact with a peer that does not answer takes a minute, and cannot be interrupted.
        threading.Thread(target=work, name="kvpool-mooncake-prove", daemon=True).start()
        try:
            nonce = read.result(timeout_s)
        except TimeoutError:
            raise PoolTimeoutError(
                f"the Transfer Engine at {self.info.session} did not answer within {timeout_s:.3f} s"
            ) from None
        if nonce != self.info.nonce:
            raise TransferError(f"the Transfer Engine at {self.info.session} belongs to another server")

    def write(self, transfer: Transfer, source: Source) -> None:
        transfer.check_bounds(self.info.nbytes)
        fill = source.filling()
        with self._call(transfer, math.inf, is_write=True) as call:
            for nth, (start, _) in enumerate(call.batches):
                call.finish(nth - len(call.buffers))
                rows = call.rows(nth)
                try:
                    wait = fill(start, rows)
                    if wait is not None:
                        wait()
                except Exception as error:
                    try:
                        call.finish(nth - 1)
                    except KVPoolError as failure:
                        raise failure from error
                    raise
                source.sum(start, [[row] for row in rows])
                call.submit(nth)
            call.finish(len(call.batches) - 1)

    def read(self, transfer: Transfer, sink: Sink) -> None:
        transfer.check_bounds(self.info.nbytes)
        self._read(transfer, sink, self._stall_timeout_s)

    def _read(self, transfer: Transfer, sink: Sink, stall_timeout_s: float) -> None:
        drain = sink.draining()
        with self._call(transfer, stall_timeout_s) as call:
            for nth in range(len(call.buffers)):
                call.submit(nth)
            for nth, (start, _) in enumerate(call.batches):
                call.finish(nth)
                rows = call.rows(nth)
                sink.sum(start, [[row] for row in rows])
                wait = drain(start, rows)
                if wait is not None:
                    wait()
                call.submit(nth + len(call.buffers))

    def close(self) -> None:
        """Ends transfers under way, which then raise, and the engine. Idempotent."""
        with self._lock:
            self._closed.set()
            self._engine = None
            self._given_up.clear()

    @contextmanager
    def _call(self, transfer: Transfer, stall_timeout_s: float, is_write: bool = False) -> Iterator[_Call]:
        """A call with buffers. Raises TransferError, and PoolTimeoutError while other calls hold all buffers."""
        call = _Call(self.info, transfer, is_write, stall_timeout_s, self._clock, self._closed)
        with self._lock:
            if self._engine is None:
                raise TransferError(f"the transport to {call.peer} is closed; open the namespace again")
            call.engine = self._engine
        nbytes = max((stop - start for start, stop in call.batches), default=0) * transfer.region_bytes
        with ExitStack() as stack:
            call.buffers = stack.enter_context(self._borrowed(nbytes, transfer.timeout_s))
            if nbytes > len(self._staging.memory):
                call.engine.register(call.buffers[0])
                stack.callback(call.engine.unregister, call.buffers[0])
            try:
                yield call
            finally:
                if not call.has_ended():
                    with self._lock:
                        self._given_up.append((call, stack.pop_all()))

    @contextmanager
    def _borrowed(self, nbytes: int, timeout_s: float) -> Iterator[list[Bytes]]:
        """Buffers of a call. The wait for them looks at the calls that gave up: the engine reports no end of theirs."""
        ends_at = time.monotonic() + timeout_s
        with ExitStack() as stack:
            while True:
                with self._lock:
                    for each in [each for each in self._given_up if each[0].has_ended()]:
                        self._given_up.remove(each)
                        each[1].close()
                left_s = ends_at - time.monotonic()
                try:
                    buffers = stack.enter_context(self._staging.borrowed(nbytes, DEPTH, min(left_s, POLL_S[1])))
                    break
                except PoolTimeoutError:
                    if left_s <= POLL_S[1]:
                        raise
            yield buffers


@dataclass(eq=False)
class _Call:
    """One write or read, batch by batch, each in one of the buffers.

    Attributes:
        batches: [start, stop) of the regions of each.
        engine, buffers: set before the first batch.
    """

    info: MooncakeInfo
    transfer: Transfer
    is_write: bool
    stall_timeout_s: float
    clock: Clock
    closed: threading.Event
    engine: Engine = field(init=False)
    buffers: list[Bytes] = field(init=False)
    _queue: deque[tuple[int, tuple[int, int, int]]] = field(default_factory=deque)
    _in_flight: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batches = self.transfer.batches()
        self.peer = f"the Transfer Engine at {self.info.session}"
        self._deadline = self.clock() + self.transfer.timeout_s

    def rows(self, nth: int) -> list[Bytes]:
        """Where the regions of a batch lie: uint8 [region_bytes] each."""
        start, stop = self.batches[nth]
        buffer = self.buffers[nth % len(self.buffers)][: (stop - start) * self.transfer.region_bytes]
        return list(buffer.reshape(stop - start, -1))

    def submit(self, nth: int) -> None:
        """Begins to move a batch, if there is such a batch. Raises PoolTimeoutError after the deadline."""
        if nth < len(self.batches):
            self._check_deadline()
            self._queue.extend((nth, span) for span in self._spans(nth))
            self._advance()

    def finish(self, nth: int) -> None:
        """Waits until all batches up to one have moved.

        Raises:
            TransferError, UnavailableError: an engine transfer failed, or the transport was closed.
            PoolTimeoutError: at the deadline, or when nothing moves.
        """
        progressed_at = time.monotonic()
        while any(batch <= nth for batch, _ in (*self._in_flight, *self._queue)):
            if self.closed.is_set():
                raise UnavailableError(f"the transport to {self.peer} was closed; open the namespace again")
            self._check_deadline()
            waited_s = time.monotonic() - progressed_at
            if self._advance():
                progressed_at = time.monotonic()
            elif waited_s > self.stall_timeout_s:
                raise PoolTimeoutError(f"{self.peer} sent nothing for {self.stall_timeout_s:.3f} s")
            else:
                time.sleep(min(max(waited_s / 8, POLL_S[0]), POLL_S[1]))
        self._check_deadline()

    def has_ended(self) -> bool:
        """Whether nothing is in flight any more. Nothing is submitted after the call's end."""
        self._queue.clear()
        with suppress(TransferError):
            self._advance()
        return not self._in_flight

    def _advance(self) -> bool:
        """Submits what the window has room for, and looks at what is in flight. Returns whether anything has ended."""
        while self._queue and len(self._in_flight) < WINDOW:
            batch, span = self._queue.popleft()
            transfer_id = self.engine.submit(self.is_write, self.info.session, *span)
            if not transfer_id:
                raise UnavailableError(
                    f"cannot reach {self.peer}; check that kvpool-server runs and that its engine's ports are open"
                )
            self._in_flight.append((batch, transfer_id))
        states = [self.engine.state(transfer_id) for _, transfer_id in self._in_flight]
        self._in_flight = [
            each for each, state in zip(self._in_flight, states, strict=True) if state is State.UNDER_WAY
        ]
        if State.FAILED in states:
            raise TransferError(f"a {'write to' if self.is_write else 'read from'} the arena by {self.peer} failed")
        return len(self._in_flight) < len(states)

    def _spans(self, nth: int) -> list[tuple[int, int, int]]:
        """A batch's engine transfers: address in the buffer, the peer's address, bytes of neighbouring regions."""
        spans: list[tuple[int, int, int]] = []
        here, region_bytes = self.buffers[nth % len(self.buffers)].ctypes.data, self.transfer.region_bytes
        for offset in self.transfer.starts(*self.batches[nth]):
            there = self.info.base_address + offset
            last = spans[-1] if spans else (0, 0, 0)
            if last[1] + last[2] == there and last[2] + region_bytes <= MAX_SPAN_BYTES:
                spans[-1] = *last[:2], last[2] + region_bytes
            else:
                spans.append((here, there, region_bytes))
            here += region_bytes
        return spans

    def _check_deadline(self) -> None:
        if self.clock() > self._deadline:
            raise PoolTimeoutError(f"a transfer to or from {self.peer} took more than {self.transfer.timeout_s:.3f} s")
