"""The `stream` transport: bytes travel through gRPC, in pieces, to and from any host.

Each direction has one staging batch for the whole call: memory that is touched for the first time costs more than the
copy into it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from kvpool import wire
from kvpool.errors import PoolTimeoutError, TransferError
from kvpool.transport.base import Drain, Fill, batches
from kvpool.transport.stall_watchdog import StallWatchdog
from kvpool.types import Piece
from kvpool.v1 import pool_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["Pool"].full_name

Bytes = npt.NDArray[np.uint8]


class StreamTransport:
    """Write and Read calls on a channel that belongs to the client."""

    name = "stream"
    one_sided = False
    in_place = False
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
        return f"StreamTransport({self._endpoint}, pieces of {self._piece_bytes} bytes)"

    def write(
        self,
        ticket_id: int,
        offsets: Sequence[int],
        region_bytes: int,
        fill: Fill,
        batch_bytes: int,
        timeout_s: float,
        permit: bytes = b"",
    ) -> None:
        failures: list[BaseException] = []
        # gRPC asks for pieces in a thread of its own, maybe after the call has failed and the caller has gone on:
        #   1. the deadline passes while `fill` copies   2. the caller reuses what `fill` copies from, or through
        # So nothing is filled once the call has ended, and the call has not ended while something is being filled.
        filling, ended = threading.Lock(), threading.Event()

        def requests() -> Iterator[Piece]:
            # What goes wrong here must reach the caller, not gRPC's log. gRPC serializes (copies) a piece before it
            # asks for the next one, so the staging can be filled again.
            staging = _staging(len(offsets), region_bytes, batch_bytes)
            try:
                for start, stop in batches(len(offsets), region_bytes, batch_bytes):
                    rows = staging[: stop - start]
                    with filling:
                        if ended.is_set():
                            return
                        fill(start, list(rows))
                    for row, offset in zip(rows, offsets[start:stop], strict=True):
                        for at in range(0, region_bytes, self._piece_bytes):
                            yield Piece(ticket_id, offset + at, row[at : at + self._piece_bytes].data)
            except Exception as error:
                failures.append(error)
                raise

        try:
            reply = self._write(requests(), timeout=timeout_s)
        except grpc.RpcError as error:
            if failures:
                raise failures[0] from None
            raise wire.error_of(error, self._endpoint) from None
        finally:
            with filling:
                ended.set()
        expected = len(offsets) * region_bytes
        if reply.nbytes != expected:
            raise TransferError(f"kvpool-server took {reply.nbytes} of {expected} bytes")

    def read(
        self,
        lease_id: int,
        offsets: Sequence[int],
        region_bytes: int,
        drain: Drain,
        batch_bytes: int,
        timeout_s: float,
        permit: bytes = b"",
    ) -> None:
        request = pb.ReadRequest(lease_id=lease_id, offsets=offsets, region_bytes=region_bytes)
        call: Any = self._read(request, timeout=timeout_s)
        staging = _staging(len(offsets), region_bytes, batch_bytes)
        watchdog = StallWatchdog(self._stall_timeout_s, call.cancel)
        try:
            with watchdog:
                for start, stop in batches(len(offsets), region_bytes, batch_bytes):
                    rows = zip(staging, offsets[start:stop], strict=False)
                    drained = drain(start, [self._receive(call, watchdog, row, offset) for row, offset in rows])
                    if drained is not None:
                        drained()
        except grpc.RpcError as error:
            if watchdog.lost:
                raise PoolTimeoutError(
                    f"kvpool-server at {self._endpoint} sent nothing for {self._stall_timeout_s:.3f} s"
                ) from None
            raise wire.error_of(error, self._endpoint) from None
        finally:
            call.cancel()

    def _receive(self, call: Iterator[Piece], watchdog: StallWatchdog, row: Bytes, offset: int) -> Bytes:
        """One region: in `row`, or where it arrived if it came in one piece."""
        filled = 0
        while filled < len(row):
            watchdog.wait()
            piece = next(call, None)
            watchdog.came()
            if piece is None:
                raise TransferError(f"the stream ended {len(row) - filled} bytes short of region {offset}")
            payload = np.frombuffer(piece.payload, np.uint8)
            if piece.offset != offset + filled or not 0 < len(payload) <= len(row) - filled:
                raise TransferError(
                    f"the stream sent {len(payload)} bytes at {piece.offset}, not the rest of region {offset}"
                )
            if len(payload) == len(row):
                return payload
            row[filled : filled + len(payload)] = payload
            filled += len(payload)
        return row

    def close(self) -> None:
        """The channel is the client's; nothing to end."""


def _staging(num_regions: int, region_bytes: int, batch_bytes: int) -> Bytes:
    """Room for the largest batch: uint8 [regions of a batch, region_bytes]."""
    largest = max((stop - start for start, stop in batches(num_regions, region_bytes, batch_bytes)), default=0)
    return np.empty((largest, region_bytes), np.uint8)
