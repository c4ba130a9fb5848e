"""The `tcp` transport: bytes travel over TCP connections to the server's data port, as many as pay.

`TcpWrite` and `TcpRead` are the transfers, `ConnectionPool` the connections that all transfers share, and `Movers`
the processes for transfers whose caller needs its own interpreter meanwhile.

After a client hangs up, a worker may still write bytes that were already received. So the ticket of a failed write is
revoked: the server frees its slots once the worker has left them, which is soon.
"""

from __future__ import annotations

import os
import weakref

from kvpool.transport.base import Bytes, Sink, Source, Transfer
from kvpool.transport.helpers import Helpers
from kvpool.transport.mover import Movers
from kvpool.transport.staging import Staging
from kvpool.transport.tcp_connection import Peer
from kvpool.transport.tcp_connections import ConnectionPool
from kvpool.transport.tcp_read import TcpRead
from kvpool.transport.tcp_write import TcpWrite
from kvpool.v1 import pool_pb2 as pb


def peer_of(info: pb.DataPort, host: str, timeout_s: float) -> Peer:
    """The data port of a server that was reached at `host`, unless `info` names another host."""
    return Peer(info.host or host, info.port, info.nonce, timeout_s, info.sealed)


class TcpTransport:
    """Regions that the server's data workers read from and write to the arena.

    Args:
        num_connections: most connections of one transfer: one for the caller's thread, and one for each helper.

    Attributes:
        memory: what bytes of callbacks pass through, out of process.
    """

    name = "tcp"
    one_sided = False

    def __init__(self, peer: Peer, num_connections: int):
        self.peer = peer
        self._num_connections = num_connections
        self._connections = ConnectionPool(peer)
        self._helpers = Helpers(num_connections - 1)
        self._staging = Staging()
        self._movers = Movers(peer, num_connections)
        self._end = weakref.finalize(self, _close_in, os.getpid(), self._movers, self._connections, self._helpers)

    def __repr__(self) -> str:
        return f"TcpTransport({self.route})"

    @property
    def memory(self) -> Bytes:
        return self._staging.memory if self._movers.memory is None else self._movers.memory

    @property
    def route(self) -> str:
        """For logs: the data port, and over how many connections a transfer goes."""
        return f"{self.peer}, {self._num_connections} connection{'s' * (self._num_connections > 1)}"

    def write(self, transfer: Transfer, source: Source) -> None:
        if not (transfer.out_of_process and self._movers.write(transfer, source)):
            TcpWrite(transfer, source, self._connections, self._helpers).run(self._staging)

    def read(self, transfer: Transfer, sink: Sink) -> None:
        if not (transfer.out_of_process and self._movers.read(transfer, sink)):
            TcpRead(transfer, sink, self._connections, self._helpers).run(self._staging)

    def close(self) -> None:
        self._end()


def _close_in(process_id: int, movers: Movers, connections: ConnectionPool, helpers: Helpers) -> None:
    """Closes only in the process that opened the connections: a fork that hangs up would end its parent's transfers."""
    if os.getpid() == process_id:
        movers.close()
        connections.close()
        helpers.close()
