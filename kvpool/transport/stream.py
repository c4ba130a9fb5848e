"""The `stream` transport: bytes travel through gRPC, in pieces, to and from any host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np

from kvpool import wire
from kvpool.errors import TransferError
from kvpool.transport.base import Drain, Fill, batches
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolStub


class StreamTransport:
    """Write and Read calls on a channel that belongs to the client."""

    name = "stream"

    def __init__(self, stub: PoolStub, endpoint: str, piece_bytes: int):
        self._stub = stub
        self._endpoint = endpoint
        self._piece_bytes = piece_bytes

    def __repr__(self) -> str:
        return f"StreamTransport({self._endpoint}, pieces of {self._piece_bytes} bytes)"

    def write(
        self, ticket_id: int, offsets: Sequence[int], region_bytes: int, fill: Fill, batch_bytes: int, timeout_s: float
    ) -> None:
        failures: list[BaseException] = []

        def requests() -> Iterator[pb.WriteRequest]:
            # gRPC runs this in a thread of its own; what goes wrong in it must reach the caller, not the log.
            try:
                for start, stop in batches(len(offsets), region_bytes, batch_bytes):
                    staging = np.empty((stop - start, region_bytes), np.uint8)
                    fill(start, list(staging))
                    for row, offset in zip(staging, offsets[start:stop], strict=True):
                        for at in range(0, region_bytes, self._piece_bytes):
                            payload = row[at : at + self._piece_bytes].tobytes()
                            yield pb.WriteRequest(ticket_id=ticket_id, offset=offset + at, payload=payload)
            except Exception as error:
                failures.append(error)
                raise

        try:
            reply = self._stub.Write(requests(), timeout=timeout_s)
        except grpc.RpcError as error:
            if failures:
                raise failures[0] from None
            raise wire.error_of(error, self._endpoint) from None
        expected = len(offsets) * region_bytes
        if reply.nbytes != expected:
            raise TransferError(f"kvpool-server took {reply.nbytes} of {expected} bytes")

    def read(
        self, lease_id: int, offsets: Sequence[int], region_bytes: int, drain: Drain, batch_bytes: int, timeout_s: float
    ) -> None:
        request = pb.ReadRequest(lease_id=lease_id, offsets=offsets, region_bytes=region_bytes)
        call: Any = self._stub.Read(request, timeout=timeout_s)
        try:
            for start, stop in batches(len(offsets), region_bytes, batch_bytes):
                staging = np.empty((stop - start, region_bytes), np.uint8)
                for row, offset in zip(staging, offsets[start:stop], strict=True):
                    self._receive(call, row, offset)
                drain(start, list(staging))
        except grpc.RpcError as error:
            raise wire.error_of(error, self._endpoint) from None
        finally:
            call.cancel()

    def _receive(self, call: Iterator[pb.ReadResponse], row: np.ndarray[Any, np.dtype[np.uint8]], offset: int) -> None:
        filled = 0
        while filled < len(row):
            piece = next(call, None)
            if piece is None:
                raise TransferError(f"the stream ended {len(row) - filled} bytes short of region {offset}")
            payload = np.frombuffer(piece.payload, np.uint8)
            if piece.offset != offset + filled or not 0 < len(payload) <= len(row) - filled:
                raise TransferError(
                    f"the stream sent {len(payload)} bytes at {piece.offset}, not the rest of region {offset}"
                )
            row[filled : filled + len(payload)] = payload
            filled += len(payload)

    def close(self) -> None:
        """The channel is the client's; nothing to end."""
