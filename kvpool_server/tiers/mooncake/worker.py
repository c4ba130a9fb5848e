"""Mooncake's client in a process of its own, `python -m kvpool_server.tiers.mooncake.worker`, and how it is called.

Nothing within a process can hold the client to a deadline: its start and its end keep Python's lock (with a stopped
master for 70 s and 8 s), its destructor waits as long for such a master, a process that ends during a call is aborted,
and a transfer that was given up goes on writing to its buffer. A process can be killed.

The process ends with its server (`child_process.py`), and `store_process.py` alone starts it. Calls come as msgpack,
over one socket a channel, which keeps messages whole. Each channel has a thread here, and each channel for transfers a
part of the staging memory that is shared with the server. Transfers take turns: a call of Mooncake's that waits keeps a
core busy, and several at once take longer than one after the other.

Mooncake parses what comes from the network, so the process may have been taken over: whatever it sends is bounded in
length and checked for its type before the server uses it, and cannot make the server wait beyond a deadline.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from kvpool.protocol.errors import ConfigError
from kvpool.transport.child_process import receive_settings, wait_for_parent_end
from kvpool.transport.mooncake_engine import engine_start, import_mooncake

ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "5000",  # Of a call to the master; else 30 s.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # Else each transfer connects.
    # A TCP transfer fails if no byte moves for so long; else 30 s, and a host that stops dead delays readers for 60 s.
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
}
"""Defaults for the life of this process: Mooncake reads some of them at the first transfer only."""
CONNECT_S = 3.0
END_S = 4
"""For leaving the cluster: the master then allocates nothing more in this process's segment."""
TRANSFERS = ("put", "get")
"""Calls that move bytes."""
MAX_MESSAGE_BYTES = 256 << 10
"""The socket's buffer holds the longest request of a tier."""
MAX_KEYS = 1024
"""Keys of one call: Mooncake's puts of 4,096 keys at once fail over TCP."""
MAX_KEY_CHARS = 512
MAX_TEXT_CHARS = 4096
SEND_S = 10.0
"""A peer that does not read is given up after so long."""

T = TypeVar("T")

Call = Literal["exist", "put", "get", "remove", "clear"]
Key = Annotated[str, Meta(max_length=MAX_KEY_CHARS)]
Size = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A call.

    Args:
        keys: of objects; for "clear" patterns of keys.
        offset, size: of the first object in the staging memory, and of each; they lie one after the other. For a call
            that moves bytes.
    """

    what: Call
    keys: Annotated[list[Key], Meta(max_length=MAX_KEYS)] = []
    offset: Size = 0
    size: Size = 0


REQUEST = msgspec.msgpack.Decoder(Request)
CODES = msgspec.msgpack.Decoder(
    Annotated[list[Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]], Meta(max_length=MAX_KEYS)]
)
"""Mooncake's code for each key of a call."""
TEXT = msgspec.msgpack.Decoder(Annotated[str, Meta(max_length=MAX_TEXT_CHARS)])
"""Why the process cannot start; empty if it has."""


class MessageError(Exception):
    """The peer has sent something that is no message of the expected type."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a channel."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)
    return ends


class MessageSocket:
    """One end of a channel, for one thread at a time."""

    def __init__(self, end: socket.socket):
        self._socket = end

    def send(self, message: Any) -> None:
        """Raises OSError if the peer has ended, or does not read."""
        self._socket.settimeout(SEND_S)
        self._socket.send(msgspec.msgpack.encode(message))

    def receive(self, decoder: msgspec.msgpack.Decoder[T], timeout_s: float | None) -> T | None:
        """The next message; None if there is none in time. `timeout_s` None: no deadline.

        Raises MessageError, EOFError if the peer has ended, or OSError.
        """
        self._socket.settimeout(timeout_s)
        try:
            payload = self._socket.recv(MAX_MESSAGE_BYTES)  # The rest of a longer message is dropped.
        except TimeoutError:
            return None
        if not payload:
            raise EOFError("the peer has ended")
        try:
            return decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MessageError(f"an invalid message ({error})") from None

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """What the process needs to join a cluster, as `MooncakeOptions` describes it.

    Args:
        memory_fd: descriptor of the staging memory of all channels for transfers.
        channel_fds: descriptors of the sockets over which calls come.
    """

    master: str
    metadata: str
    host: str
    segment_bytes: int
    protocol: str
    device: str
    memory_fd: int = -1
    channel_fds: Sequence[int] = ()


def _join(config: StoreConfig, address: int, nbytes: int) -> Any:
    """A client of the cluster that moves bytes to and from the staging memory. Raises ConfigError."""
    with engine_start(config.protocol, config.device):
        made = import_mooncake("store", "tier mooncake").MooncakeDistributedStore()
        host, _, port = config.master.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except OSError as error:
            raise ConfigError(f"no mooncake_master listens at {config.master} ({error})") from None
        engine = (config.protocol, config.device)
        if code := made.setup(config.host, config.metadata, config.segment_bytes, 0, *engine, config.master):
            raise ConfigError(
                f"Mooncake's client does not start (code {code}; its log is on stderr): check that {config.master} is "
                f"a mooncake_master, that this host can give segment={config.segment_bytes} bytes, and that other "
                f"hosts reach this one as host={config.host}"
            )
    if made.register_buffer(address, nbytes):
        raise ConfigError(f"Mooncake cannot register {nbytes} bytes of staging memory; for RDMA raise ulimit -l")
    return made


def serve(
    store: Any, channel: MessageSocket, memory: np.ndarray[tuple[int], np.dtype[np.uint8]], turn: threading.Lock
) -> None:
    """Answers the calls of one channel until the server closes it, or sends something else than a call."""
    with contextlib.closing(channel):  # Whatever ends this thread, the server sees the end of the channel.
        while True:
            try:
                request = channel.receive(REQUEST, None)
                assert request is not None
                addresses = _addresses(request, memory)
            except (EOFError, OSError, MessageError):
                return
            with turn if request.what in TRANSFERS else contextlib.nullcontext():
                codes = _answer(store, request, addresses)
            channel.send(codes)


def _addresses(request: Request, memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> list[int]:
    """Where the call's bytes lie in this process. Raises MessageError if that is not the staging memory."""
    if request.what in TRANSFERS and request.offset + request.size * len(request.keys) > memory.nbytes:
        raise MessageError(f"{request.what} of bytes outside of the staging memory")
    first = memory.ctypes.data + request.offset
    return [first + nth * request.size for nth in range(len(request.keys))]


def _answer(store: Any, request: Request, addresses: Sequence[int]) -> list[int]:
    keys, sizes = request.keys, [request.size] * len(request.keys)
    match request.what:
        case "exist":
            return list(store.batch_is_exist(keys))
        case "put":
            return list(store.batch_put_from(keys, addresses, sizes))
        case "get":
            return list(store.batch_get_into(keys, addresses, sizes))
        case "remove":
            # By force: otherwise Mooncake refuses for seconds to remove what was read or looked up lately. A reader
            # that is reading the object gets other bytes, which do not verify.
            return list(store.batch_remove(keys, True))
        case "clear":
            return [store.remove_by_regex(pattern, True) for pattern in keys]


def main() -> None:
    """Serves until the server ends."""
    config = msgspec.convert(receive_settings(), StoreConfig)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Mooncake prints; that is no output of the server.
    channels = [MessageSocket(socket.socket(fileno=fd)) for fd in config.channel_fds]
    memory = np.frombuffer(mmap.mmap(config.memory_fd, 0), np.uint8)
    try:
        store = _join(config, memory.ctypes.data, memory.nbytes)
    except ConfigError as error:
        channels[0].send(str(error)[:MAX_TEXT_CHARS])
        return
    channels[0].send("")
    turn = threading.Lock()
    for channel in channels:
        threading.Thread(target=serve, args=(store, channel, memory, turn), daemon=True).start()
    wait_for_parent_end()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(END_S)  # Ends the process even while Mooncake keeps Python's lock.
    if config.segment_bytes:
        store.close()
    os._exit(0)  # Mooncake's destructors would wait for the master.


if __name__ == "__main__":
    main()
