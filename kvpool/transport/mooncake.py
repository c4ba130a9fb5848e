"""The `mooncake` transport: one-sided reads and writes of the arena by Mooncake's Transfer Engine, over RDMA or TCP.

The server takes no part in a transfer, so it cannot check that a lease or a ticket is live. Three rules guard the
bytes, as in shared memory. The client asks for a lease or ticket just before a transfer, starts and hands over no batch
after `timeout_s`, and discards what it has read if the lease has ended meanwhile. The server keeps the slots of an
expired ticket in quarantine for `grace_ms`. Behind both are the checksums.

A transfer that was given up may still be writing, and one that failed may still have bytes in a socket. So the ticket
of a failed write is never revoked (`one_sided`): it expires, and its slots wait in quarantine.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvpool.errors import KVPoolError, TransferError, UnavailableError
from kvpool.mooncake import Bytes, Engine, State
from kvpool.transport.base import BATCH_BYTES, Clock, Sink, Source, Transfer
from kvpool.transport.pipeline import MAX_CHANNELS, TransferBatch
from kvpool.transport.threaded_pipeline import ThreadedPipeline
from kvpool.types import MooncakeInfo

DEPTH = 2
"""Batches of one call in flight: one travels while the caller fills or drains the other."""
WINDOW = 64
"""Engine transfers that a channel has in flight; an engine queues about 2,000 for a peer, and fails the others."""
MAX_SPAN_BYTES = 1 << 20
"""Largest engine transfer: larger ones would show no progress for too long."""

# How long a channel sleeps between two looks at its engine transfers: not at first, then a share of its wait so far.
_SPIN_S = 50e-6
_POLL_SHARE = 1 / 8
_POLL_S = (20e-6, 20e-3)


class MooncakeTransport:
    """Regions of an arena that the server's Transfer Engine has registered.

    Args:
        info: the server's engine; also an attribute.
        start: makes the client's engine. Called again after too many transfers were given up.
        stall_timeout_s: a read that receives nothing for so long fails.

    Attributes:
        pipeline: the one in use; replaced together with the engine.

    Raises:
        ConfigError: the client's engine does not start.
    """

    name = "mooncake"
    memory = None
    one_sided = True
    extents = None

    def __init__(
        self,
        info: MooncakeInfo,
        start: Callable[[], Engine],
        stall_timeout_s: float,
        clock: Clock = time.monotonic,
    ):
        self.info = info
        self._start = start
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._renewing = threading.Lock()
        self.pipeline = self._open()

    def __repr__(self) -> str:
        return f"MooncakeTransport({self.info.session}, {self.info.protocol})"

    def _open(self) -> ThreadedPipeline:
        engine, info = self._start(), self.info
        pipeline = ThreadedPipeline(
            functools.partial(_EngineChannel, engine, info),
            f"the Transfer Engine at {info.session}",
            DEPTH,
            self._stall_timeout_s,
            self._clock,
        )
        # Also at the interpreter's end: a thread inside the engine would crash it.
        self._end = weakref.finalize(self, pipeline.close)
        return pipeline

    def prove(self, timeout_s: float) -> None:
        """Reads the server's nonce through the engine. Raises as `read`, and TransferError for another server."""
        read: list[bytes] = []
        transfer = Transfer(0, [self.info.nonce_offset], len(self.info.nonce), timeout_s)
        self.pipeline.read(transfer, Sink(lambda _, rows: read.append(rows[0].tobytes())), stall_timeout_s=math.inf)
        if read != [self.info.nonce]:
            raise TransferError(f"the Transfer Engine at {self.info.session} belongs to another server")

    def write(self, transfer: Transfer, source: Source) -> None:
        transfer.check_bounds(self.info.nbytes)
        self._renewed().write(transfer, source)

    def read(self, transfer: Transfer, sink: Sink) -> None:
        transfer.check_bounds(self.info.nbytes)
        self._renewed().read(transfer, sink)

    def _renewed(self) -> ThreadedPipeline:
        """The pipeline; a new one with a new engine if more than half of the channels are lost to a silent peer."""
        with self._renewing:
            if self.pipeline.channels.num_lost > MAX_CHANNELS // 2:
                end_lost = self._end
                self.pipeline = self._open()
                end_lost()
            return self.pipeline

    def close(self) -> None:
        with self._renewing:
            self._end()


@dataclass(eq=False)
class _EngineChannel:
    """Moves batches by one-sided engine transfers, which nothing can stop."""

    engine: Engine
    info: MooncakeInfo
    closed: threading.Event

    def grow(self, old: Bytes, nbytes: int) -> Bytes:
        if len(old):
            self.engine.unregister(old)
        grown: Bytes = np.empty(max(BATCH_BYTES, 1 << (nbytes - 1).bit_length()), np.uint8)
        self.engine.register(grown)
        return grown

    def begin(self, batch: TransferBatch, buffer: Bytes) -> None:
        """Nothing: an engine queues no more than a window, so `finish` submits everything."""

    def finish(self, batch: TransferBatch, buffer: Bytes) -> None:
        engine, spans = self.engine, self._spans(batch, buffer)
        submit = engine.submit_write if batch.is_write else engine.submit_read
        failure: KVPoolError | None = None
        in_flight: list[int] = []
        at = 0
        since = time.monotonic()
        while in_flight or (at < len(spans) and failure is None):
            if self.closed.is_set():
                raise UnavailableError(
                    f"the transport to the Transfer Engine at {self.info.session} was closed; open the namespace again"
                )
            for span in spans[at : at + WINDOW - len(in_flight)] if failure is None else ():
                at += 1
                if not (transfer_id := submit(self.info.session, *span)):
                    failure = UnavailableError(
                        f"cannot reach the Transfer Engine of kvpool-server at {self.info.session}; check that the "
                        "server runs and that the engine's ports are open"
                    )
                    break
                in_flight.append(transfer_id)
            states = [engine.state(transfer_id) for transfer_id in in_flight]
            if State.FAILED in states and failure is None:
                verb = "write to" if batch.is_write else "read from"
                failure = TransferError(f"a {verb} the arena by the Transfer Engine at {self.info.session} failed")
            waiting = [each for each, state in zip(in_flight, states, strict=True) if state is State.UNDER_WAY]
            if len(waiting) < len(in_flight):
                in_flight, since = waiting, time.monotonic()
                batch.progressed()
            elif (waited := time.monotonic() - since) > _SPIN_S:
                time.sleep(min(max(waited * _POLL_SHARE, _POLL_S[0]), _POLL_S[1]))
        if failure is not None:
            raise failure

    def _spans(self, batch: TransferBatch, buffer: Bytes) -> list[tuple[int, int, int]]:
        """The batch's engine transfers: address in the buffer, the peer's address, bytes of neighbouring regions."""
        spans: list[tuple[int, int, int]] = []
        address, base, region_bytes = buffer.ctypes.data, self.info.base_address, batch.transfer.region_bytes
        for nth, offset in enumerate(batch.offsets):
            here, there, nbytes = spans[-1] if spans else (0, 0, 0)
            if nbytes and there + nbytes == base + offset and nbytes + region_bytes <= MAX_SPAN_BYTES:
                spans[-1] = here, there, nbytes + region_bytes
            else:
                spans.append((address + nth * region_bytes, base + offset, region_bytes))
        return spans

    def give_up(self, batch: TransferBatch) -> None:
        """Nothing: the transfer goes on, and the channel waits for its end."""

    def close(self) -> None:
        """Nothing: the engine ends with its last reference."""
