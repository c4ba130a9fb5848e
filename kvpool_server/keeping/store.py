"""Descriptors that outlive their process: it gives them to its service manager, which hands them to the next one.

The manager is systemd, or kvpool's own keeper (`keeper.py`), which speaks the same protocol. Standard library only.

Sources: sd_notify(3) for FDSTORE, sd_listen_fds(3) for LISTEN_FDS, systemd.service(5) for FileDescriptorStoreMax.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Sequence

FIRST_FD = 3
OFFERED, OFFERED_NAMES, OFFERED_TO = "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"
ROOM = "FDSTORE"
"""How many descriptors the manager stores; systemd sets it from version 254 on, and the unit for older ones."""
DESCRIPTORS = 2
"""That a server gives away: its arena's and its table's."""
ENDED = "KEPT_AFTER"
"""How kvpool's keeper says how the last server ended."""
KEEPER = "@kvpool-keeper-"
"""With the keeper's process id behind it, the address of its socket."""


def exists() -> bool:
    """Whether a manager stores what a server gives away."""
    room = os.environ.get(ROOM, "")
    return bool(os.environ.get("NOTIFY_SOCKET")) and room.isdecimal() and int(room) >= DESCRIPTORS


def take() -> dict[str, list[int]]:
    """The descriptors of an earlier process, by name, which no later call returns. They are closed at an exec."""
    count, names, pid = (os.environ.pop(name, "") for name in (OFFERED, OFFERED_NAMES, OFFERED_TO))
    found: defaultdict[str, list[int]] = defaultdict(list)
    if count.isdecimal() and pid == str(os.getpid()):
        for fd, name in zip(range(FIRST_FD, FIRST_FD + int(count)), names.split(":"), strict=False):
            os.set_inheritable(fd, False)
            found[name].append(fd)
    return dict(found)


def give(name: str, fd: int) -> None:
    """Has the manager store a descriptor beside those of the same name. Raises OSError."""
    notify("FDSTORE=1", f"FDNAME={name}", fds=[fd])


def remove(name: str) -> None:
    """Has the manager close all descriptors of a name. Raises OSError."""
    notify("FDSTOREREMOVE=1", f"FDNAME={name}")


def notify(*states: str, fds: Sequence[int] = ()) -> None:
    """Sends states such as READY=1 to the manager that started this process, if there is one. Raises OSError."""
    if not (address := os.environ.get("NOTIFY_SOCKET", "")):
        return
    name = "\0" + address[1:] if address.startswith("@") else address  # @ is systemd's way to write an abstract socket.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
        manager.connect(name)
        socket.send_fds(manager, ["\n".join(states).encode()], list(fds))


def keeper_pid() -> int | None:
    """Of kvpool's keeper, if it is this process's manager."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    return int(address.removeprefix(KEEPER).partition("-")[0]) if address.startswith(KEEPER) else None
