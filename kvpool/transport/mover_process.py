"""A process that moves bytes: `python -m kvpool.transport.mover_process`, started by `mover.py` alone."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from multiprocessing.connection import Connection

from kvpool.protocol.errors import KVPoolError, TransferError
from kvpool.transport.base import Buffers, Local
from kvpool.transport.child_process import exit_with_parent, receive_settings
from kvpool.transport.chunk_sums import ChunkSums
from kvpool.transport.helpers import STAGING_BYTES, Helpers, Staging
from kvpool.transport.mover import MAX_PEERS, MEMORY_BYTES, Batch, CallbackError, SumArray
from kvpool.transport.segment import Segment
from kvpool.transport.tcp import TcpRead, TcpWrite
from kvpool.transport.tcp_connection import Peer
from kvpool.transport.tcp_transfer import ConnectionPool


def main() -> None:
    """Moves one transfer after the other, until its parent ends."""
    settings = receive_settings()
    exit_with_parent()
    pools: OrderedDict[Peer, ConnectionPool] = OrderedDict()
    helpers = Helpers(settings["num_connections"] - 1)
    arena: Segment | None = None
    if settings["arena_bytes"]:
        arena = Segment(settings["arena_fd"], settings["arena_bytes"])
        arena.hold()
    start = settings["nth"] * MEMORY_BYTES
    memory = Segment(settings["segment_fd"], STAGING_BYTES).bytes[start : start + MEMORY_BYTES]
    staging, base = Staging(memory=memory), memory.ctypes.data
    channel = Connection(settings["channel_fd"])

    def ask(first: int, buffers: Buffers) -> None:
        channel.send(Batch(first, first + len(buffers), buffers[0].ctypes.data - base))
        if not channel.recv():
            raise CallbackError

    def connections(peer: Peer) -> ConnectionPool:
        pools[peer] = pools.pop(peer) if peer in pools else ConnectionPool(peer)  # The last used is last.
        if len(pools) > MAX_PEERS:
            pools.popitem(last=False)[1].close()
        return pools[peer]

    with contextlib.suppress(EOFError, OSError):  # The parent has ended.
        channel.send("ready")
        if arena is not None:
            arena.map_ahead()
        while True:
            peer, is_write, transfer, into = channel.recv()
            local, sums = Local(ask), None
            if arena is not None and into is not None:
                sums = ChunkSums(len(into.offsets), transfer.region_bytes, into.chunk_bytes)
                rows = [[arena.bytes[at : at + transfer.region_bytes]] for at in into.offsets]
                local = Local(rows=rows, sum=sums.add)
            said: Exception | SumArray | None
            try:
                (TcpWrite if is_write else TcpRead)(transfer, local, connections(peer), helpers).run(staging)
                said = None if sums is None else sums.values
            except (KVPoolError, CallbackError) as error:
                said = error
            except Exception as error:
                said = TransferError(f"a transfer to or from {peer} failed: {error!r}")
            channel.send(said)


if __name__ == "__main__":
    main()
