"""What a Python gRPC stream can do at all: an asyncio server that takes or gives raw bytes and does nothing with them.

Generic handlers without serializers: no protobuf, no copy into memory, no checksum. The client sends one and the same
bytes object and drops what it receives; the server keeps freed memory, as kvpool-server does.
`python -m benchmarks.peers.bare_stream PORT MESSAGE_BYTES` is the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc

from benchmarks.harness.measuring import process, wait_until
from kvpool_server.process.runtime import keep_freed_memory
from testbed.ports import free_port

DEADLINE_S = 60.0
_OPTIONS = [("grpc.max_send_message_length", 64 << 20), ("grpc.max_receive_message_length", 64 << 20)]


class BareStream:
    """A client of the bare server."""

    def __init__(self, endpoint: str, message_bytes: int):
        self._message = bytes(message_bytes)
        self._channel = grpc.insecure_channel(endpoint, options=_OPTIONS)
        self._sink = self._channel.stream_unary("/bare/Sink", None, None)
        self._source = self._channel.unary_stream("/bare/Source", None, None)

    def ready(self) -> bool:
        try:
            grpc.channel_ready_future(self._channel).result(timeout=1)
        except grpc.FutureTimeoutError:
            return False
        return True

    def put(self, count: int) -> None:
        """Sends `count` messages."""
        taken = int(self._sink(iter([self._message] * count), timeout=DEADLINE_S))
        assert taken == count * len(self._message), f"the sink took {taken} bytes"

    def get(self, count: int) -> None:
        """Receives `count` messages."""
        nbytes = sum(map(len, self._source(b"%d" % count, timeout=DEADLINE_S)))
        assert nbytes == count * len(self._message), f"the source gave {nbytes} bytes"

    def close(self) -> None:
        self._channel.close()


@contextlib.contextmanager
def bare_stream(message_bytes: int) -> Iterator[BareStream]:
    """A bare server in another process, and a client of it here."""
    port = free_port()
    with process([sys.executable, "-m", "benchmarks.peers.bare_stream", str(port), str(message_bytes)]) as running:
        client = BareStream(f"127.0.0.1:{port}", message_bytes)
        try:
            wait_until(client.ready, "the bare server", running)
            yield client
        finally:
            client.close()


class _Bare(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def __init__(self, message_bytes: int):
        self._message = bytes(message_bytes)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method == "/bare/Sink":
            return grpc.stream_unary_rpc_method_handler(self._sink)
        return grpc.unary_stream_rpc_method_handler(self._source)

    async def _sink(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        nbytes = 0
        async for request in requests:
            nbytes += len(request)
        return b"%d" % nbytes

    async def _source(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(int(request)):
            yield self._message


async def _serve(port: int, message_bytes: int) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *_OPTIONS])
    server.add_generic_rpc_handlers((_Bare(message_bytes),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await server.start()
    await stopping.wait()
    await server.stop(None)


def main(arguments: Sequence[str]) -> None:
    """Serves until SIGTERM."""
    keep_freed_memory()
    asyncio.run(_serve(int(arguments[0]), int(arguments[1])))


if __name__ == "__main__":
    main(sys.argv[1:])
