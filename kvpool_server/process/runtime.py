"""The runtime of the server's process: the event loop, in which callers take turns; malloc, and the garbage collector.

An asyncio loop runs whatever is ready in a pass, so a call waits in each of its passes for all steps of all others: a
thousand small calls at once make passes of 50 ms. Here what is ready for a caller waits in a queue of its own, and each
pass runs one callback of each queue in turn, for `PASS_S`, beside what has no caller: sockets, timers, and the first
step of each call, which gRPC hands over one by one. Source: J. Nagle, On Packet Switches With Infinite Storage (RFC
970), 1985: a queue for each source, served in turn.

By default malloc returns a freed megabyte to the kernel, and the next gRPC message pays page faults for it: more than
the copy into it. What messages have taken beyond `KEEP_BYTES` is returned some seconds after they have gone.

The collector tracks every entry, so a full collection among millions of entries takes a good part of a second, during
which the server answers no call. Entries do not need the collector: their reference counts free them. So objects that
survive one full collection are exempt from later ones (`gc.freeze`). Full collections run more often, and each examines
only objects made since the last. Cycles among young objects are still found.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, copy_context
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 10
PASS_S = 0.001
"""How long the callbacks of callers that have waited run in a pass; the last one may exceed it. In passes half as long,
a lookup of sixteen busy clients takes 6 % more of the loop's time, and others wait as long."""
MAX_DIRECT = 8
"""Callbacks that go without a queue where none waits, after each batch of gRPC's events: quicker if it is quiet."""
FLOW: ContextVar[str] = ContextVar("the caller whose work runs", default="")
"""Set by the task that serves a call; what it begins inherits it. Empty: nobody's work, which does not wait in turn."""
KEEP_BYTES = 64 << 20
"""Free memory at the end of the heap that malloc keeps."""
TRIM_EVERY_S = 4.0
MMAP_FROM_BYTES = 32 << 20
"""Larger allocations are still mapped and unmapped one by one; glibc allows no higher threshold."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
THRESHOLDS = (700, 10, 3)
"""Python's defaults are 700, 10, 10, with which more new entries wait for each full collection."""

_Ready = tuple[asyncio.Handle, Context, Callable[..., object], tuple[Any, ...]]


class EventLoop(asyncio.SelectorEventLoop):
    """Runs callbacks in turn by the `FLOW` of their contexts. A timer that is due comes before those that wait.

    Attributes:
        has_turns: whether callbacks wait for their turns.
    """

    def __init__(self) -> None:
        super().__init__()
        self._flows: dict[str, deque[_Ready]] = {}  # Those with something ready; the first one is next.
        self.has_turns = False
        self._num_direct = 0  # Callbacks of flows that went without a queue, since gRPC's last batch of events.
        self._no_flow = Context()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's; callbacks of one flow keep their order."""
        flow = FLOW.get() if context is None else context.get(FLOW, "")
        if not flow or (not self.has_turns and self._num_direct < MAX_DIRECT):
            self._num_direct += flow != ""
            return super().call_soon(callback, *args, context=context)
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        context = context or copy_context()
        handle = asyncio.Handle(callback, args, self, context)
        self._flows.setdefault(flow, deque()).append((handle, context, callback, args))
        self._have_turns()
        return handle

    def _have_turns(self) -> None:
        if self._flows and not self.has_turns:
            self.has_turns = True
            super().call_soon(self._take_turns, context=self._no_flow)

    def _take_turns(self) -> None:
        ends_at = time.monotonic() + PASS_S
        try:
            while self._flows:
                self._run_next()
                if time.monotonic() >= ends_at:
                    break
        finally:
            self.has_turns = False
            self._have_turns()

    def _run_next(self) -> None:
        flow, waiting = next(iter(self._flows.items()))
        del self._flows[flow]
        handle, context, callback, args = waiting.popleft()
        if waiting:
            self._flows[flow] = waiting
        if handle.cancelled():
            return
        try:
            context.run(callback, *args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            told = {"message": f"a callback failed: {callback!r}", "exception": error, "handle": handle}
            self.call_exception_handler(told)

    def close(self) -> None:
        """As asyncio's."""
        super().close()
        self._flows.clear()

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """As asyncio's."""
        events = getattr(getattr(callback, "func", None), "__self__", None)
        if type(events).__module__.startswith("grpc."):
            callback = functools.partial(self._new_batch, fd, callback)
        super().add_reader(fd, callback, *args)

    def _new_batch(self, events: socket.socket, handle: Callable[..., Any], *args: Any) -> None:
        """Empties the socket of gRPC's events but for one byte, which `handle` takes before it handles all events.

        gRPC's thread writes a byte for each event. Behind a burst bytes would be left, and while they fill the socket
        (some 300 bytes) the thread waits: the loop would get one event a pass. An event that comes later has a byte of
        its own.
        """
        self._num_direct = 0
        with contextlib.suppress(BlockingIOError):
            count = len(events.recv(MAX_BYTES, socket.MSG_PEEK))
            if count > 1:
                events.recv(count - 1)
        handle(*args)


async def begun(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Does work of gRPC. Where callers wait for their turns, begins it, for its end shall take none; returns its task.

    So a stream that has sent a reply reads on at once, where it would wait a round of all callers to learn of the end.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, EventLoop) and loop.has_turns:
        return asyncio.create_task(work, context=Context())
    await work
    return None


def keep_freed_memory() -> None:
    """Sets malloc's thresholds for this process; a C library without them costs only speed. Source: mallopt(3)."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)


def own_bytes() -> int:
    """Memory of this process without the arena and program files."""
    (kib,) = re.findall(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) << 10


async def return_freed_memory() -> None:
    """Returns what malloc keeps to the kernel now and then, if the process has grown by `KEEP_BYTES`; until cancelled.

    A thread does it, and holds malloc's locks for a two-hundredth of the time at most. Source: malloc_trim(3).
    """
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def seconds_of_trim() -> float:
        began = time.monotonic()
        trim(0)
        return time.monotonic() - began

    enough, wait_s = own_bytes() + KEEP_BYTES, TRIM_EVERY_S
    while trim is not None:
        await asyncio.sleep(wait_s)
        if own_bytes() > enough:
            wait_s = max(TRIM_EVERY_S, 200 * await asyncio.to_thread(seconds_of_trim))


def keep_collections_short() -> None:
    """Configures this process's garbage collector, and exempts what is there. Idempotent."""
    if freeze_survivors not in gc.callbacks:
        gc.callbacks.append(freeze_survivors)
    gc.set_threshold(*THRESHOLDS)
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Turns the collector off while the body makes millions of lasting objects, and exempts these from it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def freeze_survivors(phase: str, info: dict[str, int]) -> None:
    """A callback of the collector: exempts from later collections what a full collection has kept."""
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()
