"""The `grpc` transport: bytes travel through the server's gRPC port, in pieces. Slow, and possible from any host.

A call has one staging buffer for all of its batches: the first touch of new memory costs more than a copy into it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from kvpool import wire
from kvpool.errors import PoolTimeoutError, TransferError
from kvpool.transport.base import Sink, Source, Transfer
from kvpool.types import Piece
from kvpool.v1 import pool_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["Pool"].full_name

Bytes = npt.NDArray[np.uint8]


class GrpcTransport:
    """Write and Read calls on the client's gRPC channel.

    Args:
        endpoint: the server's name in errors.
        piece_bytes: largest payload of one message.
        stall_timeout_s: a read that receives nothing for so long fails.
    """

    name = "grpc"
    one_sided = False
    memory = None

    def __init__(self, channel: grpc.Channel, endpoint: str, piece_bytes: int, stall_timeout_s: float):
        self._write = channel.stream_unary(
            f"/{_SERVICE}/Write",
            request_serializer=wire.encode_piece,
            response_deserializer=pb.WriteResponse.FromString,
        )
        self._read = channel.unary_stream(
            f"/{_SERVICE}/Read",
            request_serializer=pb.ReadRequest.SerializeToString,
            response_deserializer=wire.decode_piece,
        )
        self._endpoint = endpoint
        self._piece_bytes = piece_bytes
        self._stall_timeout_s = stall_timeout_s

    def __repr__(self) -> str:
        return f"GrpcTransport({self._endpoint}, pieces of {self._piece_bytes} bytes)"

    def write(self, transfer: Transfer, source: Source) -> None:
        fill, region_bytes = source.filling(), transfer.region_bytes
        failures: list[BaseException] = []
        # gRPC asks for pieces on a thread of its own, and may do so after the call has failed:
        #   1. the deadline passes while `fill` copies   2. the caller reuses the memory that `fill` copies from
        # So no `fill` begins after the call has ended, and the call does not end while `fill` runs.
        filling, ended = threading.Lock(), threading.Event()

        def requests() -> Iterator[Piece]:
            # An exception here must reach the caller, not gRPC's log. gRPC serializes (copies) a piece before it
            # asks for the next one, so the staging buffer can be filled again.
            staging = _staging(transfer)
            try:
                for start, stop in transfer.batches():
                    rows = staging[: stop - start]
                    with filling:
                        if ended.is_set():
                            return
                        wait = fill(start, list(rows))
                        if wait is not None:
                            wait()
                        source.sum(start, [[row] for row in rows])
                    for row, offset in zip(rows, transfer.starts(start, stop), strict=True):
                        for at in range(0, region_bytes, self._piece_bytes):
                            payload = row[at : at + self._piece_bytes].data
                            yield Piece(transfer.holding_id, offset + at, payload)
            except Exception as error:
                failures.append(error)
                raise

        try:
            reply = self._write(requests(), timeout=transfer.timeout_s)
        except grpc.RpcError as error:
            if failures:
                raise failures[0] from None
            raise wire.error_of(error, self._endpoint) from None
        finally:
            with filling:
                ended.set()
        expected = len(transfer.offsets) * region_bytes
        if reply.nbytes != expected:
            raise TransferError(f"kvpool-server at {self._endpoint} wrote {reply.nbytes} of {expected} bytes")

    def read(self, transfer: Transfer, sink: Sink) -> None:
        drain = sink.draining()
        request = pb.ReadRequest(
            lease_id=transfer.holding_id, offsets=transfer.starts(), region_bytes=transfer.region_bytes
        )
        call: Any = self._read(request, timeout=transfer.timeout_s)
        staging = _staging(transfer)
        watchdog = _StallWatchdog(self._stall_timeout_s, call.cancel)
        try:
            with watchdog:
                for start, stop in transfer.batches():
                    rows = zip(staging, transfer.starts(start, stop), strict=False)
                    received = [self._receive(call, watchdog, row, offset) for row, offset in rows]
                    sink.sum(start, [[row] for row in received])
                    wait = drain(start, received)
                    if wait is not None:
                        wait()
        except grpc.RpcError as error:
            if watchdog.has_stalled:
                raise PoolTimeoutError(
                    f"kvpool-server at {self._endpoint} sent nothing for {self._stall_timeout_s:.3f} s"
                ) from None
            raise wire.error_of(error, self._endpoint) from None
        finally:
            call.cancel()

    def _receive(self, call: Iterator[Piece], watchdog: _StallWatchdog, row: Bytes, offset: int) -> Bytes:
        """One region: in `row`, or in the message itself if the region arrived in one piece."""
        filled = 0
        while filled < len(row):
            with watchdog.waiting():
                piece = next(call, None)
            if piece is None:
                raise TransferError(
                    f"kvpool-server at {self._endpoint} ended the read {len(row) - filled} bytes before the end of the "
                    f"region at {offset}"
                )
            payload = np.frombuffer(piece.payload, np.uint8)
            if piece.offset != offset + filled or not 0 < len(payload) <= len(row) - filled:
                raise TransferError(
                    f"kvpool-server at {self._endpoint} sent {len(payload)} bytes for offset {piece.offset}, expected "
                    f"at most {len(row) - filled} for offset {offset + filled}"
                )
            if len(payload) == len(row):
                return payload
            row[filled : filled + len(payload)] = payload
            filled += len(payload)
        return row

    def close(self) -> None:
        """Nothing to end: the channel is the client's."""


class _StallWatchdog:
    """Ends a read whose peer sends nothing for too long, which a deadline alone would let wait until it passes.

    A context manager around the read; time outside of `waiting` does not count.

    Args:
        limit_s: longest wait.
        cancel: ends the call. Called on the watchdog's thread, at most a quarter of the limit late.

    Attributes:
        has_stalled: whether a wait was longer, so that the call was cancelled.
    """

    def __init__(self, limit_s: float, cancel: Callable[[], object]):
        self._limit_s = limit_s
        self._cancel = cancel
        self._waiting_since = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvpool-watchdog", daemon=True)
        self.has_stalled = False

    def __enter__(self) -> _StallWatchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around one wait for the peer."""
        self._waiting_since = time.monotonic()
        yield
        self._waiting_since = 0.0

    def _watch(self) -> None:
        while not self._done.wait(self._limit_s / 4):
            since = self._waiting_since
            if since and time.monotonic() - since > self._limit_s:
                self.has_stalled = True
                self._cancel()
                return


def _staging(transfer: Transfer) -> Bytes:
    """A buffer for the largest batch: uint8 [regions of a batch, region_bytes]."""
    largest = max((stop - start for start, stop in transfer.batches()), default=0)
    return np.empty((largest, transfer.region_bytes), np.uint8)
