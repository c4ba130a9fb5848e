"""Data workers of tests: in this process, over an arena of the test's own, or a server's, by their ids."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvpool.transport.base import Local, Transfer
from kvpool.transport.data_port import Kind, Signer, pack_offsets
from kvpool.transport.mover import Movers
from kvpool.transport.tcp import TcpTransport, peer_of
from kvpool.transport.tcp_connection import Peer
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.data_plane.admission import MAX_CONNECTIONS, MAX_SEATS, MAX_UNPROVEN, Admission
from kvpool_server.data_plane.permits import PermitTable
from kvpool_server.data_plane.worker import TALLY_COLUMNS, DataPort, serve
from tests.support.processes import ServerProcess, wait_for

KEY, NONCE = b"k" * 32, b"n" * 16
NUM_ENTRIES = 10_000
NOWHERE = Peer("127.0.0.1", 1, NONCE, 1.0)


class Port:
    """A data port in this process.

    Attributes:
        arena: uint8 [nbytes].
        tally: payload bytes read, and written.
        permits: `end` of it ends the permits of a ticket or lease.
    """

    def __init__(self, nbytes: int, max_connections: int, max_unproven: int, sealed: bool):
        self.arena = np.zeros(nbytes, np.uint8)
        self.tally = np.zeros(TALLY_COLUMNS, np.uint64)
        self.permits = PermitTable(KEY, NUM_ENTRIES, 1, MAX_SEATS, sealed=sealed)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.info = pb.DataPort(port=self.listener.getsockname()[1], nonce=NONCE, sealed=sealed)
        port = DataPort(
            self.arena.data,
            Signer(KEY),
            NONCE,
            self.tally,
            self.permits.entries,
            self.permits.words_of(0),
            sealed,
            Admission(max_connections, max_unproven),
        )
        self.thread = threading.Thread(target=serve, args=(self.listener, port), daemon=True)
        self.thread.start()

    def peer(self, timeout_s: float = 5.0) -> Peer:
        return peer_of(self.info, "127.0.0.1", timeout_s)

    def connect(self, num_connections: int, timeout_s: float = 5.0) -> TcpTransport:
        return TcpTransport(self.peer(timeout_s), num_connections)

    def permit(
        self, kind: Kind, holding_id: int, offsets: Sequence[int], region_bytes: int, ttl_s: float = 60.0
    ) -> bytes:
        deadline_ns = time.monotonic_ns() + int(ttl_s * 1e9)
        return self.permits.permit(kind, holding_id, deadline_ns, region_bytes, pack_offsets(offsets))


@contextmanager
def data_port(
    nbytes: int = 64 << 20,
    max_connections: int = MAX_CONNECTIONS,
    max_unproven: int = MAX_UNPROVEN,
    *,
    sealed: bool = False,
) -> Iterator[Port]:
    """A data port until the end of the block."""
    port = Port(nbytes, max_connections, max_unproven, sealed)
    try:
        yield port
    finally:
        port.listener.shutdown(socket.SHUT_RDWR)
        port.listener.close()
        port.thread.join(30)
        assert not port.thread.is_alive()
        port.permits.close()


class Permitted:
    """A transport that signs its own permits, for tests without a server that would."""

    name, one_sided = TcpTransport.name, TcpTransport.one_sided

    def __init__(self, transport: TcpTransport, port: Port):
        self.inner = transport
        self.memory = transport.memory
        self._port = port

    def write(self, transfer: Transfer, source: Local) -> None:
        self.inner.write(self._permitted(Kind.WRITE, transfer), source)

    def read(self, transfer: Transfer, sink: Local) -> None:
        self.inner.read(self._permitted(Kind.READ, transfer), sink)

    def _permitted(self, kind: Kind, transfer: Transfer) -> Transfer:
        if transfer.permit:
            return transfer
        permit = self._port.permit(
            kind, transfer.holding_id, transfer.offsets, transfer.permitted_bytes or transfer.region_bytes
        )
        return dataclasses.replace(transfer, permit=permit)

    def close(self) -> None:
        self.inner.close()


def wait_for_mover(movers: Movers) -> int:
    """Has a process started, and waits until it takes transfers; returns its id."""
    nothing = Transfer(1, (), 64, 5.0), Local(lambda first, buffers: None)
    wait_for(lambda: movers.move(NOWHERE, *nothing, is_write=True), "the process that moves bytes")
    return movers._idle[-1].pid


WORKER, MOVER = "kvpool_server.data_plane.worker", "kvpool.transport.mover_process"


def workers_of(server: ServerProcess, module: str = WORKER) -> list[int]:
    """Process ids of a server's live data workers, or of its children that run another module."""
    children: list[int] = []
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        children += map(int, (task / "children").read_text().split())
    return [pid for pid in children if is_worker(pid, module)]


@contextmanager
def workers_stopped(server: ServerProcess) -> Iterator[None]:
    """Stops a server's data workers, and continues them at the end of the block."""
    workers = workers_of(server)
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)


def is_worker(pid: int, module: str = WORKER) -> bool:
    """Whether this process runs the module, and is no zombie."""
    try:
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
