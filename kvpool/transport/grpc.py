"""The `grpc` transport: bytes of regions in PutChunks and GetChunks, in pieces. Slow, and possible from any host.

A call has one staging buffer for all of its batches: the first touch of new memory costs more than a copy into it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from kvpool.protocol import wire
from kvpool.protocol.errors import PoolTimeoutError, TransferError
from kvpool.protocol.messages import PiecedChannel
from kvpool.transport.base import Bytes, Local, Transfer, call_back
from kvpool.v1 import pool_pb2 as pb

_PAYLOAD = pb.PutChunksRequest.PAYLOAD_FIELD_NUMBER


class GrpcTransport:
    """PutChunks and GetChunks calls on the client's gRPC channel.

    Args:
        endpoint: the server's name in errors.
        piece_bytes: largest payload of one message.
        stall_timeout_s: a read that receives nothing for so long fails.
    """

    name = "grpc"
    one_sided = False
    memory = None

    def __init__(self, channel: grpc.Channel, endpoint: str, piece_bytes: int, stall_timeout_s: float):
        self._put = channel.stream_unary(f"/{wire.SERVICE_NAME}/PutChunks", None, pb.PutChunksResponse.FromString)
        self._get = PiecedChannel(channel).unary_stream(
            f"/{wire.SERVICE_NAME}/GetChunks", pb.GetChunksRequest.SerializeToString, pb.GetChunksResponse.FromString
        )
        self._endpoint = endpoint
        self._piece_bytes = piece_bytes
        self._stall_timeout_s = stall_timeout_s

    def __repr__(self) -> str:
        return f"GrpcTransport({self._endpoint}, pieces of {self._piece_bytes} bytes)"

    def write(self, transfer: Transfer, local: Local) -> None:
        fill, region_bytes = local.acting(is_write=True), transfer.region_bytes
        failures: list[BaseException] = []
        # gRPC asks for pieces on a thread of its own, and may do so after the call has failed:
        #   1. the deadline passes while `fill` copies   2. the caller reuses the memory that `fill` copies from
        # So no `fill` begins after the call has ended, and the call does not end while `fill` runs.
        filling, ended = threading.Lock(), threading.Event()

        def requests() -> Iterator[bytes]:
            # An exception here must reach the caller, not gRPC's log. A message is a copy: the staging buffer can be
            # filled again.
            staging = np.empty((transfer.batch_regions, region_bytes), np.uint8)
            try:
                for start, stop in transfer.batches():
                    rows = staging[: stop - start]
                    with filling:
                        if ended.is_set():
                            return
                        call_back(fill, local.sum, start, list(rows), is_write=True)
                    for row, offset in zip(rows, transfer.starts(start, stop), strict=True):
                        for at in range(0, region_bytes, self._piece_bytes):
                            piece = pb.PutChunksRequest(ticket_id=transfer.holding_id, offset=offset + at)
                            yield wire.with_payload(piece, _PAYLOAD, row[at : at + self._piece_bytes].data)
            except Exception as error:
                failures.append(error)
                raise

        try:
            reply = self._put(requests(), timeout=transfer.timeout_s)
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

    def read(self, transfer: Transfer, local: Local) -> None:
        drain, region_bytes = local.acting(is_write=False), transfer.region_bytes
        request = pb.GetChunksRequest(
            lease_id=transfer.holding_id, offsets=transfer.starts(), region_bytes=region_bytes
        )
        staging = np.empty((transfer.batch_regions, region_bytes), np.uint8)
        call: Any = self._get(request, timeout=transfer.timeout_s)
        with ThreadPoolExecutor(1, "kvpool-grpc-read") as receiver:
            try:
                for start, stop in transfer.batches():
                    rows = zip(staging, transfer.starts(start, stop), strict=False)
                    received = [self._receive(call, receiver, row, offset) for row, offset in rows]
                    call_back(drain, local.sum, start, received, is_write=False)
            except grpc.RpcError as error:
                raise wire.error_of(error, self._endpoint) from None
            finally:
                call.cancel()

    def _receive(self, call: Any, receiver: ThreadPoolExecutor, row: Bytes, offset: int) -> Bytes:
        """One region: in `row`, or in the message itself if the region arrived in one piece."""
        filled = 0
        while filled < len(row):
            next_piece = receiver.submit(next, call, None)  # gRPC's own wait ends at the call's deadline alone.
            try:
                piece = next_piece.result(self._stall_timeout_s)
            except TimeoutError:
                raise PoolTimeoutError(
                    f"kvpool-server at {self._endpoint} sent nothing for {self._stall_timeout_s:.3f} s"
                ) from None
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
