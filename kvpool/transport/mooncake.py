"""The `mooncake` transport: one-sided reads and writes of the arena by Mooncake's Transfer Engine, over RDMA or TCP.

The server takes no part in a transfer, so it cannot check that a lease or a ticket is live. Three rules guard the
bytes, as in shared memory. The client asks for a lease or ticket just before a transfer, starts and hands over no batch
after `timeout_s`, and discards what it has read if the lease has ended meanwhile. The server keeps the slots of an
expired ticket in quarantine for `grace_ms`. Behind both are the checksums.

Nothing can stop an engine transfer. So the ticket of a failed write is never revoked (`one_sided`), and buffers of a
call that gave up are lent again only once all engine transfers of the call have ended.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from kvpool.protocol.errors import PoolTimeoutError, TransferError, UnavailableError
from kvpool.transport.base import Bytes, Clock, Local, Transfer, call_back
from kvpool.transport.helpers import Staging
from kvpool.transport.mooncake_engine import DONE, FAILED, UNDER_WAY, Engine
from kvpool.v1 import pool_pb2 as pb

STAGING_BYTES = 64 << 20
"""Memory that is registered with the client's engine, and lent to calls."""
WINDOW = 64
"""Engine transfers that a call has in flight; an engine queues about 2,000 for a peer, and fails the others."""
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

    def __init__(self, info: pb.MooncakeEngine, engine: Engine, stall_timeout_s: float, clock: Clock = time.monotonic):
        self.info = info
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._closed = threading.Event()
        self._staging = Staging(STAGING_BYTES)
        engine.register(self._staging.memory)
        self._engine: Engine | None = engine

    def __repr__(self) -> str:
        return f"MooncakeTransport({self.info.session}, {self.info.protocol})"

    def prove(self, timeout_s: float) -> None:
        """Reads the server's nonce through the engine. Raises as `read`, and TransferError for another server."""
        read: Future[bytes] = Future()
        transfer = Transfer(0, [self.info.nonce_offset], len(self.info.nonce), timeout_s)

        def work() -> None:
            try:
                self._read(transfer, Local(lambda _, rows: read.set_result(rows[0].tobytes())), math.inf)
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

    def write(self, transfer: Transfer, local: Local) -> None:
        transfer.check_bounds(self.info.nbytes)
        with self._call(transfer, math.inf) as call:
            for start, stop in transfer.batches():
                rows = call.rows(stop - start)
                call_back(local.acting(is_write=True), local.sum, start, rows, is_write=True)
                call.move(rows, transfer.starts(start, stop), is_write=True)

    def read(self, transfer: Transfer, local: Local) -> None:
        transfer.check_bounds(self.info.nbytes)
        self._read(transfer, local, self._stall_timeout_s)

    def _read(self, transfer: Transfer, local: Local, stall_timeout_s: float) -> None:
        with self._call(transfer, stall_timeout_s) as call:
            for start, stop in transfer.batches():
                rows = call.rows(stop - start)
                call.move(rows, transfer.starts(start, stop), is_write=False)
                call_back(local.acting(is_write=False), local.sum, start, rows, is_write=False)

    def close(self) -> None:
        """Ends transfers under way, which then raise, and the engine. Idempotent."""
        self._closed.set()
        self._engine = None

    @contextmanager
    def _call(self, transfer: Transfer, stall_timeout_s: float) -> Iterator[_Call]:
        """A call with a buffer. Raises TransferError, and PoolTimeoutError while other calls hold all memory."""
        deadline = self._clock() + transfer.timeout_s
        if (engine := self._engine) is None:
            raise TransferError(f"the transport to {self.info.session} is closed; open the namespace again")
        nbytes = transfer.region_bytes * transfer.batch_regions
        with ExitStack() as stack:
            (buffer,) = stack.enter_context(self._staging.borrowed(nbytes, 1, transfer.timeout_s))
            if nbytes > len(self._staging.memory):
                engine.register(buffer)
                stack.callback(engine.unregister, buffer)
            call = _Call(self.info, engine, buffer, transfer, stall_timeout_s, self._clock, deadline, self._closed)
            try:
                yield call
            finally:
                if call.in_flight:
                    held = stack.pop_all()
                    threading.Thread(target=call.end, args=[held], name="kvpool-mooncake-end", daemon=True).start()


@dataclass(eq=False)
class _Call:
    """One write or read, batch by batch, through one buffer."""

    info: pb.MooncakeEngine
    engine: Engine
    buffer: Bytes
    transfer: Transfer
    stall_timeout_s: float
    clock: Clock
    deadline: float
    closed: threading.Event
    in_flight: list[int] = field(default_factory=list)  # Ids of the engine transfers that have not ended.

    def rows(self, count: int) -> list[Bytes]:
        """Where the regions of a batch lie: uint8 [region_bytes] each."""
        return list(self.buffer[: count * self.transfer.region_bytes].reshape(count, -1))

    def move(self, rows: Sequence[Bytes], starts: Sequence[int], *, is_write: bool) -> None:
        """Moves a batch to or from these offsets in the arena.

        Raises:
            TransferError, UnavailableError: an engine transfer failed, or the transport was closed.
            PoolTimeoutError: at the deadline, or when nothing moves.
        """
        for row, start in zip(rows, starts, strict=True):
            self._wait(WINDOW - 1)
            transfer_id = self.engine.submit(is_write, self.info.session, row, self.info.base_address + start)
            if not transfer_id:
                raise UnavailableError(
                    f"cannot reach the Transfer Engine at {self.info.session}; check that kvpool-server runs and that "
                    "its engine's ports are open"
                )
            self.in_flight.append(transfer_id)
        self._wait(0)

    def end(self, held: ExitStack) -> None:
        """Closes what a call that gave up holds once nothing is in flight, unless the transport is closed before."""
        while self.in_flight and not self.closed.wait(POLL_S[1]):
            self._poll()
        if not self.in_flight:
            held.close()

    def _wait(self, most: int) -> None:
        """Returns when no more than so many engine transfers are in flight. Raises as `move`."""
        progressed_at = time.monotonic()
        while len(self.in_flight) > most:
            if self.closed.is_set():
                raise UnavailableError(f"the transport to {self.info.session} was closed; open the namespace again")
            self._check_deadline()
            waited_s = time.monotonic() - progressed_at
            states = self._poll()
            if FAILED in states:
                raise TransferError(f"a transfer to or from the Transfer Engine at {self.info.session} failed")
            if DONE in states:
                progressed_at = time.monotonic()
            elif waited_s > self.stall_timeout_s:
                raise PoolTimeoutError(f"{self.info.session} sent nothing for {self.stall_timeout_s:.3f} s")
            else:
                time.sleep(min(max(waited_s / 8, POLL_S[0]), POLL_S[1]))
        self._check_deadline()

    def _poll(self) -> list[int]:
        """States of the engine transfers that were in flight; those that have ended are no longer."""
        states = list(map(self.engine.state, self.in_flight))
        self.in_flight = [each for each, state in zip(self.in_flight, states, strict=True) if state == UNDER_WAY]
        return states

    def _check_deadline(self) -> None:
        if self.clock() > self.deadline:
            raise PoolTimeoutError(
                f"a transfer to or from {self.info.session} took more than {self.transfer.timeout_s:.3f} s"
            )
