"""A process in the place of Mooncake's client that has been taken over: `kvpool_server.tiers.mooncake.worker`, hostile.

The server's setting `master` says what the process does: "ready" or "start", a colon, and a key of MISDEEDS. It does
that instead of saying that it is ready, or instead of an answer.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import msgspec

from kvpool.transport.child_process import exit_with_parent, receive_settings

Send = Callable[[bytes], object]


class _Pickled:
    """Executes a command where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HOSTILE_MARK"],)


def _packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def _flood(send: Send) -> None:
    while True:
        send(bytes(1 << 16))


MISDEEDS: dict[str, Callable[[Send], None]] = {
    "a pickle": lambda send: send(pickle.dumps(_Pickled())),
    "a pickle as multiprocessing sends it": lambda send: send(
        struct.pack("!i", len(pickle.dumps(_Pickled()))) + pickle.dumps(_Pickled())
    ),
    "another type": lambda send: send(_packed({"codes": [0]})),
    "huge codes": lambda send: send(_packed([1 << 40])),
    "too many codes": lambda send: send(_packed([1] * 2)),
    "too few codes": lambda send: send(_packed([])),
    "a thousand times too many codes": lambda send: send(_packed([1] * 100_000)),
    "no UTF-8": lambda send: send(b"\xa2\xff\xff"),
    "a long text": lambda send: send(_packed("x" * 100_000)),
    "no bytes": lambda send: send(b""),
    "a longer message than any": lambda send: send(_packed([1] * (300 << 10))),
    "a flood": _flood,
    "nothing": lambda send: None,
    "half a message": lambda send: send(_packed([1, 2])[:-1]),
    "the end": lambda send: os._exit(0),
}


def main() -> None:
    """Misbehaves until the server ends."""
    settings = receive_settings()
    exit_with_parent()
    when, _, misdeed = settings["master"].partition(":")
    try:
        os.ftruncate(settings["memory_fd"], 0)  # The server would end with a bus error.
    except PermissionError:
        pass
    channels = [socket.socket(fileno=fd) for fd in settings["channel_fds"]]
    if when == "ready":
        channels[0].send(_packed(""))
        channels[0].recv(1 << 18)
    try:
        MISDEEDS[misdeed](channels[0].send)
    except OSError:
        return  # The server has closed the channel.
    time.sleep(60)


if __name__ == "__main__":
    main()
