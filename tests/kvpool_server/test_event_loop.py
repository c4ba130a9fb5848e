"""gRPC's events reach the loop together, however many have come since its last pass."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvpool_server.process import event_loop
from kvpool_server.process.event_loop import EventLoop


def test_the_socket_is_empty_when_the_events_have_been_handled() -> None:
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    handled: list[int] = []

    def handle() -> None:
        reader.recv(1)
        handled.append(1)
        if len(handled) == 1:
            writer.send(b"1")  # Of an event that comes meanwhile.

    with reader, writer:
        writer.send(bytes(500))
        event_loop._handle(reader, handle)
        assert reader.recv(10, socket.MSG_PEEK) == b"1", "the loop is woken for the late event"
        event_loop._handle(reader, handle)
        with pytest.raises(BlockingIOError):
            reader.recv(1)


def test_grpc_is_recognized_and_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[..., Any]] = []
    mend = event_loop._handle
    monkeypatch.setattr(event_loop, "_handle", lambda *args: (calls.append(args[1]), mend(*args)))

    async def run() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary("/nobody/knows")(b"")
        assert calls, "gRPC reads its events in another way: is the mend still needed?"
        before = len(calls)
        reader, writer = socket.socketpair()
        with reader, writer:
            loop, came = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(reader, came.set)
            writer.send(b"1")
            await came.wait()
            loop.remove_reader(reader)
        await server.stop(None)
        assert all(call.func.__self__.__class__.__module__.startswith("grpc.") for call in calls[before:])  # type: ignore[attr-defined]

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(run())
