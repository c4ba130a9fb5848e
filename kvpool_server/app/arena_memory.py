"""The arena's memory: made and backed at the start, handed out to clients on this host, and zeroed between tenants.

The arena is one file (memfd). Where callers are not authenticated, every client that may connect maps the file. Where
callers are authenticated, no client maps it, and an extent is zeroed before another tenant gets it.

The pool gives out backed memory only: a write to memory that the system cannot provide would end in SIGBUS, in an
engine. A server of 100 GiB answers before all of its arena is backed, and stops without waiting for the rest.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import socket
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import structlog
from pydantic import ByteSize

from kvpool.protocol.errors import ConfigError
from kvpool.transport.mooncake_engine import Engine
from kvpool.transport.segment import Segment, is_abandoned
from kvpool.transport.unix_socket import MAGIC, REQUEST_BYTES, Address, abstract_name, memory_path, peer_of
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.arena import Arena
from kvpool_server.data_plane.workers import DataWorkers
from kvpool_server.keeping import store
from kvpool_server.keeping.adoption import ARENA, KeptMemory, make_table
from kvpool_server.keeping.table import TABLE, SlotTable
from kvpool_server.process.addresses import bind_path, cannot_bind
from kvpool_server.rpc.chunks import WRITTEN_BYTES
from kvpool_server.settings.config import ServerConfig

log = structlog.get_logger()

PREDECESSOR_S = 15.0
"""How long a start waits for engines to unmap the memory of a server that ran here before."""
LOOK_EVERY_S = 0.5
STEP_BYTES = 32 << 20
COPIERS = 4
"""Threads that move blocks to memory of another size."""
EXTENSION_S = 30
"""A service manager that bounds a start is told in time that blocks are still being moved, and waits so much longer."""
CGROUP = Path("/sys/fs/cgroup")
"""Of this process, as a container sees it."""
BACKLOG = 128
MAX_WAITING, PATIENCE_S = 64, 1.0
"""Clients of a memory socket that have sent nothing yet, and how long each may wait; one more disconnects the first."""
ACCEPT_AGAIN_S = 0.1
LOG_EVERY_S = 10.0


def check_fits(memory: ByteSize) -> None:
    """Raises ConfigError if the host, or the cgroup that the server runs in, can never hold an arena of this size."""
    _check(memory, "the host's memory", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if (limit := _cgroup_bytes("memory.max")) is not None:
        _check(memory, "the container's memory limit", limit)


def check_free(memory: ByteSize) -> None:
    """Raises ConfigError if less memory is free now: backing the arena would end in the kernel's OOM killer."""
    _check(memory, "the free memory", free_bytes())


def free_bytes() -> int:
    """Memory that the host, and the cgroup that the server runs in, can give at the moment."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = int(available[1]) << 10 if available else 1 << 62
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and used is not None:
        # The page cache of files counts as used, and gives way.
        cached = re.findall(r"^(?:in)?active_file (\d+)", (CGROUP / "memory.stat").read_text(), re.MULTILINE)
        free = min(free, limit - used + sum(map(int, cached)))
    return free


def _cgroup_bytes(name: str) -> int | None:
    """A figure of the cgroup; None if there is none, or no limit."""
    try:
        text = (CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _check(memory: ByteSize, what: str, limit: int) -> None:
    if memory > limit:
        size, most = memory.human_readable(), ByteSize(max(0, limit)).human_readable()
        raise ConfigError(f"memory = {size} is more than {what}, {most}; lower --memory")


class ArenaMemory:
    """The arena of one server and its memory, which `create` makes. The event loop owns it.

    Raises ConfigError if the host can never hold the arena.

    Args:
        has_tenants: whether callers are authenticated, so that extents belong to tenants.

    Attributes:
        table: of what lies in the arena, for the next server; None: nobody keeps the memory.
        is_adopted: whether what lies there is of the server before.
    """

    def __init__(self, config: ServerConfig, *, has_tenants: bool):
        check_fits(config.memory)
        self._config = config
        self._is_kept = config.keep == "yes" and store.exists()
        self._kept = KeptMemory(config.memory, has_tenants=has_tenants, is_kept=self._is_kept)
        self.arena = Arena(config.memory, self._kept.extent_bytes, 0, self._zero if has_tenants else None)
        self.backed_bytes = 0
        self.segment: Segment
        self.table: SlotTable | None = None
        self.is_adopted = False
        self._step: asyncio.Future[None] | None = None

    async def create(self, stack: AsyncExitStack) -> None:
        """Adopts the memory of the server before, or makes new memory. The stack closes it when the server ends."""
        if taken := await self._kept.take():
            before, table = taken
            if before.nbytes == self.arena.arena_bytes:
                self.segment, self.table = taken
                self._back(table.backed_bytes)
            else:
                await asyncio.to_thread(self._move, before, table)
            self.is_adopted = self.table is not None
        else:
            await self._wait_for_memory()
            self._make()
        stack.callback(self.segment.close)
        if self.table is not None:
            stack.callback(self.table.close)
        if not self.segment.is_sealed:
            log.warning("this system cannot seal memory (memfd), so clients on this host get it over the network")
        stack.push_async_callback(self._wait_for_step)

    async def _wait_for_memory(self) -> None:
        """Waits a little where engines still map the memory of a predecessor. Raises ConfigError."""
        deadline = time.monotonic() + PREDECESSOR_S
        if free_bytes() < self._config.memory:
            log.info("waits for memory that engines of a predecessor may still map", longest_s=PREDECESSOR_S)
        while free_bytes() < self._config.memory and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_EVERY_S)
        check_free(self._config.memory)

    def _make(self, secret: int = 0) -> None:
        segment = self.segment = Segment.create(self.arena.arena_bytes)
        if self._is_kept and segment.is_sealed and is_abandoned(segment.fd):
            self.table = make_table(self.arena, segment, secret)

    def _move(self, before: Segment, old: SlotTable) -> None:
        """Moves what lies in memory of another size to the same offsets in new memory, extent by extent.

        Each record follows its bytes, so that a death costs no more than what has not been moved. What has been moved
        is given back, so that both take little more than the larger one. Raises ConfigError if that is too much.
        """
        room = free_bytes() + os.fstat(before.fd).st_blocks * 512
        _check(self._config.memory, "the free memory and what blocks of the server before have", room)
        log.info("moves the blocks of the server before", bytes_before=before.nbytes, bytes_now=self.arena.arena_bytes)
        with suppress(OSError):
            for name in (ARENA, TABLE):
                store.remove(name)
        self._make(old.secret)
        extent_bytes, lock = old.extent_bytes, threading.Lock()
        began_at = told_at = time.monotonic()

        def move(start: int) -> None:
            stop = min(start + STEP_BYTES, end)
            if not is_used:
                before.discard(start, stop - start)
            with lock:  # Each sees what is free when the others have theirs.
                self._populate(start, stop - start)
            if is_used:
                self.segment.bytes[start:stop] = before.bytes[start:stop]
                before.discard(start, stop - start)

        try:
            if self.table is not None:
                self.table.copy(old)
                with ThreadPoolExecutor(COPIERS) as threads:
                    for idx in range(min(old.backed_bytes, self.arena.arena_bytes) // extent_bytes):
                        end, is_used = (idx + 1) * extent_bytes, bool(old.slot_bytes(idx))
                        deque(threads.map(move, range(idx * extent_bytes, end, STEP_BYTES)), 0)
                        self.table.copy(old, idx)
                        self._back(end)
                        if time.monotonic() - told_at > EXTENSION_S / 3:
                            told_at = time.monotonic()
                            with suppress(OSError):
                                store.notify(f"EXTEND_TIMEOUT_USEC={EXTENSION_S}000000")
        except MemoryError as error:
            log.warning("not all blocks of the server before are moved", reason=str(error))
        finally:
            before.close()
            old.close()
        log.info("moved", bytes=self.backed_bytes, seconds=round(time.monotonic() - began_at, 1))

    async def back_step(self) -> None:
        """Backs the next `STEP_BYTES` on a thread. Raises MemoryError if the system has no more memory to give."""
        start, total = self.backed_bytes, self.segment.nbytes
        nbytes = min(STEP_BYTES, total - start)
        self._step = asyncio.ensure_future(asyncio.to_thread(self._populate, start, nbytes))
        try:
            await asyncio.shield(self._step)
        except MemoryError as error:
            raise MemoryError(f"{error} ({start} of {total} bytes are backed)") from None
        self._back(start + nbytes)

    def _back(self, nbytes: int) -> None:
        """The first `nbytes` have memory. The table says so first: what it calls new has never had a block."""
        if self.table is not None:
            self.table.backed_bytes = nbytes
        self.backed_bytes = nbytes
        self.arena.back(nbytes)

    def _populate(self, start: int, nbytes: int) -> None:
        if (free := free_bytes()) < nbytes:  # The kernel would not refuse: it would end a process.
            raise MemoryError(f"no memory for the arena at {start}: {max(0, free)} bytes are free")
        self.segment.populate(start, nbytes)

    async def back_all(self) -> None:
        """Backs what is left. Raises as `back_step`."""
        while self.backed_bytes < self.segment.nbytes:
            await self.back_step()

    async def _wait_for_step(self) -> None:
        """The caller of a step may have been cancelled, and the segment is closed next."""
        if self._step is not None:
            await asyncio.wait((self._step,))

    def _zero(self, start: int, nbytes: int) -> None:
        self.segment.bytes[start : start + nbytes] = 0

    def hand_out(self, stack: AsyncExitStack) -> None:
        """Opens the sockets by which clients get memory; they need no gRPC to answer."""
        path, mode = self._config.unix_listen, self._config.unix_mode_bits
        if self._is_everybodys:
            stack.callback(MemorySocket(abstract_name(self.segment.token), self.segment).close)
            if path:
                stack.callback(MemorySocket(memory_path(path), self.segment, mode).close)

    @property
    def _is_everybodys(self) -> bool:
        return self.segment.is_sealed and not self.arena.has_tenants

    def offer(self, engine: Engine | None, data: DataWorkers | None) -> pb.PingResponse:
        """The transports of this server, for callers that may open namespaces."""
        offer = pb.PingResponse(piece_bytes=WRITTEN_BYTES)
        nbytes = self.segment.nbytes
        whole: dict[str, Any] = {"nbytes": nbytes, "nonce": self.segment.nonce, "nonce_offset": nbytes}
        if self._is_everybodys:
            kept = self.table is not None
            offer.segment.MergeFrom(pb.Segment(token=self.segment.token, kept=kept, **whole))
        if engine is not None:
            address = self.segment.whole.ctypes.data
            offer.mooncake.MergeFrom(
                pb.MooncakeEngine(session=engine.session, protocol=engine.protocol, base_address=address, **whole)
            )
        if data is not None:
            port = pb.DataPort(host=data.told_host, port=data.port, nonce=data.nonce, sealed=data.sealed)
            offer.data_port.MergeFrom(port)
        return offer


class MemorySocket:
    """Hands out the descriptor of the arena's memory to clients on this host that present its token.

    Clients that reach gRPC by TCP connect to a name in the abstract namespace. Any process in this network namespace
    can do so, so a client's user must be the server's, or root. Clients that reach gRPC by a Unix socket connect to a
    path beside it, and the path's `mode` says who may.

    Made and used on the event loop. Raises ConfigError if it cannot listen.
    """

    def __init__(self, address: Address, segment: Segment, mode: int = 0o600):
        self._address = address
        self._segment = segment
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[asyncio.Task[None], None] = OrderedDict()
        self._refused, self._logged_at = 0, -LOG_EVERY_S
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            if isinstance(address, str):
                bind_path(address, mode, lambda: self._listener.bind(address))
            else:
                self._listener.bind(address)
            self._listener.listen(BACKLOG)
        except (OSError, ConfigError) as error:
            self._listener.close()
            raise cannot_bind(address, error) if isinstance(error, OSError) else error from None
        self._listen()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_WAITING):  # Then the loop's other work comes first.
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                self._loop.remove_reader(self._listener)  # Too many open files: the loop would spin.
                self._loop.call_later(ACCEPT_AGAIN_S, self._listen)
                return
            client.setblocking(False)
            _, uid = peer_of(client)
            if isinstance(self._address, bytes) and uid not in (os.geteuid(), 0):
                self._refuse(client, "another user's process; see --unix-listen")
                continue
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popitem(last=False)[0].cancel()
            task = self._loop.create_task(self._answer(client))
            self._waiting[task] = None
            task.add_done_callback(lambda ended: self._waiting.pop(ended, None))

    async def _answer(self, client: socket.socket) -> None:
        """Answers a client's request, and hangs up."""
        with client, suppress(OSError):  # The client has disconnected, or sent nothing in time.
            async with asyncio.timeout(PATIENCE_S):
                request = await self._loop.sock_recv(client, REQUEST_BYTES + 1)
            if secrets.compare_digest(request, MAGIC + self._segment.token):
                socket.send_fds(client, [MAGIC], [self._segment.fd])
                pid, uid = peer_of(client)
                log.debug("handed out shared memory", pid=pid, uid=uid)
            elif request:
                self._refuse(client, "not the token of this server's memory")

    def _refuse(self, client: socket.socket, why: str) -> None:
        pid, uid = peer_of(client)
        client.close()
        self._refused += 1
        if time.monotonic() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = time.monotonic()
            log.warning("refused shared memory", why=why, pid=pid, uid=uid, refused_so_far=self._refused)

    def close(self) -> None:
        """Hands out nothing more. Memory that clients have mapped stays theirs. Idempotent."""
        if self._listener.fileno() < 0:
            return
        if isinstance(self._address, str):
            with suppress(OSError):
                os.unlink(self._address)  # First: a socket that nobody listens on may be replaced by a successor's.
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in self._waiting:
            task.cancel()
