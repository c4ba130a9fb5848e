"""The process that is Mooncake's client: `python -m kvpool_server.tiers.mooncake.worker`, started by `store.py` alone.

It is a process of its own because Mooncake's client cannot be held to a deadline within another: its start and its end
keep Python's lock (a master that is stopped: 70 s and 8 s), its destructor waits for such a master for as long, a
process that ends while a call is under way is aborted, and a transfer that was given up goes on writing to its buffer.
A process can be killed.

What it is told comes as one line of JSON on standard input, which stays open as long as the server lives: it ends with
it. Calls come over one socket a lane, each with a thread here and a part of the memory that is shared with the server.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvpool.errors import ConfigError
from kvpool.mooncake import package, starting

ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "5000",  # Of a call to the master; else 30 s.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # Else each transfer connects.
    # In which a byte has to move over TCP; else 30 s, and a host that stops dead holds up its readers for 60 s.
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
}
"""For all of this process's life, where they are not set: Mooncake reads some of them at the first transfer only."""
CONNECT_S = 3.0
END_S = 4
"""For saying goodbye to the master, which then gives the segment to nobody any more."""

Request = tuple[str, Sequence[str], Sequence[int], Sequence[int]]
"""(what, keys, offsets in the shared memory, sizes in bytes)"""


@dataclass(frozen=True, slots=True)
class Order:
    """What the process is told.

    Args:
        master: HOST:PORT.
        metadata: metadata server of the Transfer Engine.
        host: by which others reach this machine.
        segment_bytes: memory that it gives to the cluster; 0 for none.
        protocol, device: of the Transfer Engine.
        memory_fd: of the memory that is shared with the server.
        lane_fds: of the sockets over which calls come.
    """

    master: str
    metadata: str
    host: str
    segment_bytes: int
    protocol: str
    device: str
    memory_fd: int = -1
    lane_fds: Sequence[int] = ()

    def encode(self) -> bytes:
        """One line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Order:
        """What `encode` made."""
        return cls(**json.loads(line))


def _set_up(order: Order, address: int, nbytes: int) -> Any:
    """A client of the cluster, which may move bytes from and to the shared memory. Raises ConfigError."""
    with starting(order.protocol, order.device):
        made = package("store", "tier mooncake").MooncakeDistributedStore()
        host, _, port = order.master.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except OSError as error:
            raise ConfigError(f"nobody listens at {order.master} ({error})") from None
        engine = (order.protocol, order.device)
        if code := made.setup(order.host, order.metadata, order.segment_bytes, 0, *engine, order.master):
            raise ConfigError(
                f"Mooncake's client does not start (code {code}; its log is on stderr): either {order.master} is no "
                f"mooncake_master, or this machine cannot give segment={order.segment_bytes} bytes, or host="
                f"{order.host} is not its name"
            )
    if made.register_buffer(address, nbytes):
        raise ConfigError(f"Mooncake cannot register {nbytes} bytes; over RDMA they must be lockable (ulimit -l)")
    return made


def _serve(store: Any, lane: Connection, base: int) -> None:
    """Answers the calls of one lane until the server hangs up."""
    with lane:  # Whatever ends this thread, the server hears of it.
        while True:
            try:
                what, keys, offsets, sizes = lane.recv()
            except (EOFError, OSError):
                return
            lane.send(_answer(store, what, keys, [base + offset for offset in offsets], sizes))


def _answer(store: Any, what: str, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
    match what:
        case "exist":
            return list(store.batch_is_exist(keys))
        case "put":
            return list(store.batch_put_from(keys, addresses, sizes))
        case "get":
            return list(store.batch_get_into(keys, addresses, sizes))
        case "remove":
            # By force: without, Mooncake keeps for seconds what was read or asked for lately. Who is just reading it
            # finds other bytes then, and they do not verify.
            return list(store.batch_remove(keys, True))
        case _:
            return [store.remove_by_regex(pattern, True) for pattern in keys]


def main() -> None:
    """Serves until standard input ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # The server's business, which goes on calling while it drains.
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # What Mooncake prints is not for the server's output.
    order = Order.decode(sys.stdin.buffer.readline())
    lanes = [Connection(fd) for fd in order.lane_fds]
    memory = np.frombuffer(mmap.mmap(order.memory_fd, 0), np.uint8)
    try:
        store = _set_up(order, memory.ctypes.data, memory.nbytes)
    except ConfigError as error:
        lanes[0].send(str(error))
        return
    lanes[0].send("")
    for lane in lanes:
        threading.Thread(target=_serve, args=(store, lane, memory.ctypes.data), daemon=True).start()
    sys.stdin.buffer.read()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(END_S)  # Ends the process even where Mooncake keeps Python's lock.
    if order.segment_bytes:
        store.close()
    os._exit(0)  # Mooncake's destructors would wait for the master.


if __name__ == "__main__":
    main()
