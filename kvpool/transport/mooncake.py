"""The `mooncake` transport: one-sided reads and writes of the arena by Mooncake's Transfer Engine, over RDMA or TCP.

The server takes no part in a transfer, so it cannot check that a lease or a ticket is live. Three rules guard the
bytes, as in shared memory. The client asks for a lease or ticket just before a transfer, starts and hands over no batch
after `timeout_s`, and discards what it has read if the lease has ended meanwhile. The server keeps the slots of an
expired ticket in quarantine for `grace_ms`. Behind both are the checksums.

Nothing can stop an engine transfer. So the ticket of a failed write is never revoked (`one_sided`), and buffers of a
call that gave up are lent again only once all engine transfers of the call have ended.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

from kvpool.protocol.errors import PoolTimeoutError, TransferError, UnavailableError
from kvpool.transport.base import Clock, Local, Transfer, call_back
from kvpool.transport.helpers import STAGING_BYTES, Help, Staging
from kvpool.transport.mooncake_engine import DONE, UNDER_WAY, Engine
from kvpool.v1 import pool_pb2 as pb

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
        self._staging = Staging(STAGING_BYTES)
        engine.register(self._staging.memory)
        self._engine: Engine | None = engine

    def __repr__(self) -> str:
        return f"MooncakeTransport({self.info.session}, {self.info.protocol})"

    def prove(self, timeout_s: float) -> None:
        """Reads the server's nonce through the engine. Raises as `read`, and TransferError for another server."""
        transfer, read = Transfer(0, [self.info.nonce_offset], len(self.info.nonce), timeout_s), list[bytes]()
        local = Local(lambda _, rows: read.append(rows[0].tobytes()))
        reading = Help(lambda: self._move(transfer, local, is_write=False))
        # The engine's first contact with a peer that does not answer takes a minute, and cannot be interrupted.
        threading.Thread(target=reading.begin, name="kvpool-mooncake-prove", daemon=True).start()
        try:
            reading.result(timeout_s)
        except TimeoutError:
            raise PoolTimeoutError(
                f"the Transfer Engine at {self.info.session} did not answer within {timeout_s:.3f} s"
            ) from None
        if read != [self.info.nonce]:
            raise TransferError(f"the Transfer Engine at {self.info.session} belongs to another server")

    def write(self, transfer: Transfer, local: Local) -> None:
        transfer.check_bounds(self.info.nbytes)
        self._move(transfer, local, is_write=True)

    def read(self, transfer: Transfer, local: Local) -> None:
        transfer.check_bounds(self.info.nbytes)
        self._move(transfer, local, is_write=False)

    def close(self) -> None:
        """Ends transfers under way, which then raise, and the engine. Idempotent."""
        self._engine = None

    def _move(self, transfer: Transfer, local: Local, *, is_write: bool) -> None:
        """Moves batch by batch, through one buffer. Raises PoolTimeoutError while other calls hold all memory."""
        deadline, engine = self._clock() + transfer.timeout_s, self._engine
        if engine is None:
            raise TransferError(f"the transport to {self.info.session} is closed; open the namespace again")
        nbytes, act = transfer.region_bytes * transfer.batch_regions, local.acting(is_write=is_write)
        if nbytes > len(self._staging.memory):
            raise TransferError(f"a batch of {nbytes} bytes is larger than the {STAGING_BYTES} that are registered")
        in_flight: list[int] = []  # Ids of the engine transfers that have not ended.
        with ExitStack() as stack:
            (buffer,) = stack.enter_context(self._staging.borrowed(nbytes, 1, transfer.timeout_s))
            try:
                for start, stop in transfer.batches():
                    rows = list(buffer[: (stop - start) * transfer.region_bytes].reshape(stop - start, -1))
                    if is_write:
                        call_back(act, local.sum, start, rows, is_write=True)
                    moves = list(zip(rows, transfer.starts(start, stop), strict=True))
                    for at in range(0, len(moves), WINDOW):
                        self._check(deadline, transfer)
                        for row, offset in moves[at : at + WINDOW]:
                            there = self.info.base_address + offset
                            in_flight.append(engine.submit(is_write, self.info.session, row, there))
                        self._wait(engine, in_flight, deadline, transfer)
                    if not is_write:
                        call_back(act, local.sum, start, rows, is_write=False)
            finally:
                if in_flight:
                    arguments = (engine, in_flight, stack.pop_all())
                    threading.Thread(target=self._end, args=arguments, name="kvpool-mooncake-end", daemon=True).start()

    def _wait(self, engine: Engine, in_flight: list[int], deadline: float, transfer: Transfer) -> None:
        """Returns when no engine transfer is in flight."""
        moved_at = time.monotonic()
        while in_flight:
            self._check(deadline, transfer)
            states = _poll(engine, in_flight)
            waited_s = time.monotonic() - moved_at
            if not states <= {UNDER_WAY, DONE}:
                raise TransferError(f"a transfer to or from the Transfer Engine at {self.info.session} failed")
            if DONE in states:
                moved_at = time.monotonic()
            elif waited_s > self._stall_timeout_s:
                raise PoolTimeoutError(f"{self.info.session} sent nothing for {self._stall_timeout_s:.3f} s")
            else:
                time.sleep(min(max(waited_s / 8, POLL_S[0]), POLL_S[1]))
        self._check(deadline, transfer)

    def _end(self, engine: Engine, in_flight: list[int], held: ExitStack) -> None:
        """Closes what a call that gave up holds once nothing is in flight, unless the transport is closed before."""
        while in_flight and self._engine is not None:
            time.sleep(POLL_S[1])
            _poll(engine, in_flight)
        if not in_flight:
            held.close()

    def _check(self, deadline: float, transfer: Transfer) -> None:
        if self._engine is None:
            raise UnavailableError(f"the transport to {self.info.session} was closed; open the namespace again")
        if self._clock() > deadline:
            late = f"a transfer to or from {self.info.session} took more than {transfer.timeout_s:.3f} s"
            raise PoolTimeoutError(late)


def _poll(engine: Engine, in_flight: list[int]) -> set[int]:
    """States of the engine transfers that were in flight; those that have ended are taken out."""
    states = {each: engine.state(each) for each in in_flight}
    in_flight[:] = [each for each, state in states.items() if state == UNDER_WAY]
    return set(states.values())
