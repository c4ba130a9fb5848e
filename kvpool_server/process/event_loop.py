"""The event loop of the server, in which callers take turns, and with a mend for gRPC's events.

An asyncio loop runs whatever is ready in a pass, so a call waits in each of its passes for all steps of all others: a
thousand small calls at once make passes of 50 ms. Here what is ready for a caller waits in a queue of its own. Each
pass runs one callback of each queue in turn, for `PASS_S`, and begins with what has no caller: sockets, timers, and new
calls, which gRPC hands over one in a pass.

gRPC's thread writes a byte to a socket for each event, and the loop's reader takes one byte, then handles all events.
So behind a burst bytes are left, and while they fill the socket (some 300 bytes) the thread waits: the loop then gets
one event a pass, and a small call takes as many passes as there were events before it.

Source: J. Nagle, On Packet Switches With Infinite Storage (RFC 970), 1985: a queue for each source, served in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any

MAX_BYTES = 64 << 10
PASS_S = 0.0005
"""How long the callbacks of callers may run in a pass, which ends with the callback that exceeds it."""

MAX_DIRECT = 8
"""Callbacks that do not wait in turn where none waits, after each of gRPC's events: it is quicker."""

FLOW: ContextVar[str] = ContextVar("the caller whose work runs", default="")
"""Set by the task that serves a call; tasks that it begins inherit it. Empty: nobody's, which does not wait in turn."""

_Ready = tuple[asyncio.Handle, Context, Callable[..., object], tuple[Any, ...]]


class EventLoop(asyncio.SelectorEventLoop):
    """Runs callbacks in turn by the `FLOW` of their contexts, and empties the socket of gRPC's events beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self._flows: dict[str, deque[_Ready]] = {}  # Those with something ready; the first one is next.
        self._has_turns = False
        self._num_direct = 0  # Callbacks of flows that did not wait in turn, since gRPC's last events.

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's; callbacks of one flow keep their order."""
        flow = FLOW.get() if context is None else context.get(FLOW, "")
        if not flow or (not self._flows and self._num_direct < MAX_DIRECT):
            self._num_direct += flow != ""
            return super().call_soon(callback, *args, context=context)
        context = context or copy_context()
        handle = asyncio.Handle(callback, args, self, context)
        self._flows.setdefault(flow, deque()).append((handle, context, callback, args))
        self._have_turns()
        return handle

    def _have_turns(self) -> None:
        if self._flows and not self._has_turns:
            self._has_turns = True
            super().call_soon(self._take_turns, context=_NO_FLOW)

    def _take_turns(self) -> None:
        ends_at = time.monotonic() + PASS_S
        while self._flows and time.monotonic() < ends_at:
            flow, ready = next(iter(self._flows.items()))
            del self._flows[flow]
            handle, context, callback, args = ready.popleft()
            if ready:
                self._flows[flow] = ready
            if not handle.cancelled():
                try:
                    context.run(callback, *args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    message = f"a callback failed: {callback!r}"
                    self.call_exception_handler({"message": message, "exception": error, "handle": handle})
        self._has_turns = False
        self._have_turns()

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """As asyncio's."""
        events = getattr(getattr(callback, "func", None), "__self__", None)
        if type(events).__module__.startswith("grpc."):
            callback = functools.partial(self._hand_over, fd, callback)
        super().add_reader(fd, callback, *args)

    def _hand_over(self, events: socket.socket, handle: Callable[..., Any], *args: Any) -> None:
        self._num_direct = 0
        _handle(events, handle, *args)


_NO_FLOW = Context()


def _handle(events: socket.socket, handle: Callable[..., Any], *args: Any) -> None:
    """Leaves one byte, which `handle` takes. An event that comes later has a byte of its own."""
    with contextlib.suppress(BlockingIOError):
        count = len(events.recv(MAX_BYTES, socket.MSG_PEEK))
        if count > 1:
            events.recv(count - 1)
    handle(*args)
