"""A connector whose import opens a socket and starts a thread."""

from __future__ import annotations

import socket
import threading
import time

from tests.conformance.reference import ReferenceConnector

_probe = socket.socket()
threading.Thread(target=time.sleep, args=(1,), name="started by an import", daemon=True).start()


class StartsWhenImported(ReferenceConnector):
    """Breaks nothing else."""
