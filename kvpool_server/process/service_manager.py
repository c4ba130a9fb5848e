"""What a service manager is told: systemd's sd_notify, without its library.

Source: https://www.freedesktop.org/software/systemd/man/sd_notify.html. Without NOTIFY_SOCKET in the
environment nothing is sent, so that a server started by hand behaves alike.
"""

from __future__ import annotations

import os
import socket

import structlog

log = structlog.get_logger()


def notify(*states: str) -> None:
    """Sends states such as READY=1 to the manager that started this process. A failure is only logged."""
    if not (address := os.environ.get("NOTIFY_SOCKET", "")):
        return
    name = "\0" + address[1:] if address.startswith("@") else address  # @ is systemd's way to write an abstract socket.
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.connect(name)
            manager.sendall("\n".join(states).encode())
    except OSError as error:
        log.warning("the service manager could not be told", notify_socket=address, states=states, error=str(error))
