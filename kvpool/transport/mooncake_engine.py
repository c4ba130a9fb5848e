"""Mooncake's Transfer Engine, as the server and the client use it. Only this module imports Mooncake, and only on use.

The server's Mooncake tier imports Mooncake's store from here, too (`import_mooncake`, `engine_start`).

Transfers are one-sided: an engine reads and writes memory that a peer has registered, and the peer takes no part. A
transfer is submitted, then polled, instead of the engine's own `batch_transfer_sync_*`: that call waits in a loop that
takes a core from the threads that move bytes (two cores are half as fast again without), has a deadline of its own, and
reports a failure as soon as one of several transfers has failed, while others may still touch the buffer.

Threads: any thread may call anything. The engine releases the GIL in `submit_*` and `state`; the destructor of its last
reference holds the GIL until the engine's listening thread has ended.
"""

from __future__ import annotations

import importlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvpool.protocol.errors import ConfigError, TransferError, UnavailableError
from kvpool.transport.segment import Bytes

RDMA_DEVICES = Path("/sys/class/infiniband")
LISTEN_WAIT_US = 50_000
UNDER_WAY, DONE, FAILED = 0, 1, -1
"""States of a transfer, which touches its buffer until it is DONE or FAILED."""
_start_lock = threading.Lock()


class Engine:
    """A Transfer Engine, which listens on two free ports of all of this host's addresses, and the memory registered
    with it, which lives as long as the engine.

    Args:
        host: name or address by which peers reach this host.
        protocol: "tcp" or "rdma"; also an attribute.
        device: of RDMA, for example "mlx5_0", or several with commas; empty: any.

    Attributes:
        session: HOST:PORT, by which peers address the engine.

    Raises ConfigError if the package, a library or the RDMA device is missing; the message says which.
    """

    _native: Any = None

    def __init__(self, host: str, protocol: str, device: str = ""):
        with engine_start(protocol, device):
            native = import_mooncake("engine", "transport mooncake").TransferEngine()
            if native.initialize(host, "P2PHANDSHAKE", protocol, device):
                raise ConfigError(
                    f"Mooncake's Transfer Engine does not start at {host!r} over {protocol}; see its log on stderr"
                )
        self._native = native
        self._memory: list[Bytes] = []
        _listen_in_short_waits(port := native.get_rpc_port())
        self.session = f"{host}:{port}"
        self.protocol = protocol

    def __del__(self) -> None:
        self._native = None  # Before the memory: the engine's threads may write there until they have ended.

    def __repr__(self) -> str:
        return f"Engine({self.session}, {self.protocol})"

    def register(self, memory: Bytes) -> None:
        """Registers memory for transfers: uint8 [n], kept while the engine lives. Raises TransferError."""
        self._memory.append(memory)
        if self._native.batch_register_memory([memory.ctypes.data], [memory.nbytes]):
            raise TransferError(
                f"Mooncake's Transfer Engine cannot register {memory.nbytes} bytes; for RDMA raise the lockable memory "
                "(ulimit -l unlimited)"
            )

    def submit(self, is_write: bool, session: str, memory: Bytes, there: int) -> int:
        """Begins to move registered memory to or from a peer's address; returns the transfer's id.

        Raises UnavailableError if the peer cannot be reached.
        """
        native = self._native
        start = native.batch_transfer_async_write if is_write else native.batch_transfer_async_read
        if not (transfer_id := int(start(session, [memory.ctypes.data], [there], [memory.nbytes]))):
            raise UnavailableError(
                f"cannot reach the Transfer Engine at {session}; check that kvpool-server runs and that its engine's "
                "ports are open"
            )
        return transfer_id

    def state(self, transfer_id: int) -> int:
        """State of a transfer. The id is invalid once the transfer has been seen to end."""
        status = int(self._native.transfer_check_status(transfer_id))
        return status if status in (DONE, FAILED) else UNDER_WAY


def address_towards(host: str) -> str:
    """This host's address, as `host` sees it. Raises TransferError."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # Sends nothing.
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransferError(f"no route to {host!r}: {error}") from None


def import_mooncake(module: str, needed_by: str) -> Any:
    """Imports a module of Mooncake's package, for what the error names as `needed_by`: "transport mooncake".

    Raises ConfigError, which says which package or library is missing.
    """
    try:
        return importlib.import_module(f"mooncake.{module}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{needed_by} needs a package that is not installed ({error}); pip install "
            "'mooncake-transfer-engine>=0.3.13', or 'mooncake-transfer-engine-non-cuda>=0.3.13' where there is no CUDA"
        ) from None
    except ImportError as error:
        raise ConfigError(
            f"mooncake-transfer-engine lacks a system library ({error}); "
            "apt-get install libibverbs1 librdmacm1 libnuma1, or your system's packages of them"
        ) from None


@contextmanager
def engine_start(protocol: str, device: str) -> Iterator[None]:
    """Around the start of an engine, one at a time. `protocol` and `device` as of `Engine.start`.

    The engine reads some settings from variables alone; variables that are set already keep their values.

    Raises ConfigError if the RDMA device is missing.
    """
    wanted = {
        "MC_LOG_LEVEL": "ERROR",
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # Else each transfer connects, without a deadline.
    }
    if protocol == "tcp":
        wanted["MC_FORCE_TCP"] = "1"  # Else it uses RDMA wherever there is a device, whatever `protocol` says.
    else:
        _check_rdma(device)
    with _start_lock:
        added = wanted.keys() - os.environ
        os.environ.update({name: wanted[name] for name in added})
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


def _check_rdma(device: str) -> None:
    """Raises ConfigError if an RDMA device is missing: the engine would use TCP, without a word."""
    there = sorted(entry.name for entry in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []
    wanted = [name for name in device.split(",") if name]
    if missing := [name for name in wanted if name not in there]:
        raise ConfigError(f"no RDMA device {missing[0]!r} in {RDMA_DEVICES}; there are: {', '.join(there) or 'none'}")
    if not there:
        raise ConfigError(f"no RDMA device in {RDMA_DEVICES}: this machine or container has none; use tcp")


def _listen_in_short_waits(port: int) -> None:
    """Makes the engine's listening thread check more often whether it must end.

    By default it checks once a second, and the engine's destructor waits for that with the GIL: every thread of the
    process would stop, those of an inference engine among them.
    """
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(link).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as shared:
                listens = shared.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and shared.family in (socket.AF_INET, socket.AF_INET6) and shared.getsockname()[1] == port:
                    shared.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, LISTEN_WAIT_US))
        except OSError:
            continue  # Its owner has closed it meanwhile.
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), LISTEN_WAIT_US / 1e6):
        pass  # Ends the wait under way, which still lasts a second.
