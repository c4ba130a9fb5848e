"""A process that moves bytes: `python -m kvpool.transport.mover_process`, started by `mover.py` alone."""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection

from kvpool.protocol.errors import KVPoolError, TransferError
from kvpool.transport.base import Buffers, Local
from kvpool.transport.child_process import exit_with_parent, receive_settings
from kvpool.transport.helpers import STAGING_BYTES, Helpers, Staging
from kvpool.transport.mover import MEMORY_BYTES, Batch, CallbackError
from kvpool.transport.segment import Segment
from kvpool.transport.tcp import TcpRead, TcpWrite
from kvpool.transport.tcp_connection import Peer
from kvpool.transport.tcp_transfer import ConnectionPool


def main() -> None:
    """Moves one transfer after the other, until the engine ends."""
    settings = receive_settings()
    exit_with_parent()
    peer = Peer(**{**settings["peer"], "nonce": bytes.fromhex(settings["peer"]["nonce"])})
    connections, helpers = ConnectionPool(peer), Helpers(settings["num_connections"] - 1)
    start = settings["nth"] * MEMORY_BYTES
    memory = Segment(settings["segment_fd"], STAGING_BYTES).bytes[start : start + MEMORY_BYTES]
    staging, base = Staging(memory=memory), memory.ctypes.data
    channel = Connection(settings["channel_fd"])

    def ask(first: int, buffers: Buffers) -> None:
        channel.send(Batch(first, first + len(buffers), buffers[0].ctypes.data - base))
        if not channel.recv():
            raise CallbackError

    with contextlib.suppress(EOFError, OSError):  # The engine has ended.
        channel.send("ready")
        while True:
            is_write, transfer = channel.recv()
            said: Exception | None = None
            try:
                (TcpWrite if is_write else TcpRead)(transfer, Local(ask), connections, helpers).run(staging)
            except (KVPoolError, CallbackError) as error:
                said = error
            except Exception as error:
                said = TransferError(f"a transfer to or from {peer} failed: {error!r}")
            channel.send(said)


if __name__ == "__main__":
    main()
