"""The data workers of a server: starts them, replaces those that die, ends them. Owned by the event loop's thread."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import structlog

from kvpool.data_port import NONCE_BYTES, Signer
from kvpool.types import DataPortInfo, SegmentInfo
from kvpool_server.data_plane.worker import TALLY_COLUMNS, Order

log = structlog.get_logger()

BACKLOG = 128
LOOK_EVERY_S = 0.25
READY_S = 3.0
END_S = 2.0
REPLACE_S = (0.1, 10.0)
"""How long after a worker's death the next one starts: twice as long each time, up to a bound."""

HEALTHY_S = 60.0
"""Who lived so long did not die of its start."""


def default_count() -> int:
    """Workers for this machine: more than one where cores are many, since each has an interpreter of its own."""
    return min(4, max(1, len(os.sched_getaffinity(0)) // 4))


@dataclass(slots=True)
class _Seat:
    """Where a worker is, or is to be."""

    process: subprocess.Popen[bytes]
    started_at: float
    deaths: int = 0
    replace_at: float = 0.0


class DataWorkers:
    """A listening socket, and the processes that accept from it.

    Args:
        host, port: where to listen; port 0 takes a free one.
        told_host: how clients are to call the host; empty: as they call the server.

    Attributes:
        signer: makes the permits that the workers take.
        info: what clients are told.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, port: int, told_host: str, count: int, segment: SegmentInfo):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._segment = segment
        self._key, self._nonce = secrets.token_bytes(32), secrets.token_bytes(NONCE_BYTES)
        self._tally_fd = os.memfd_create("kvpool-data-tally")
        os.ftruncate(self._tally_fd, count * TALLY_COLUMNS * 8)
        self._tallies = np.frombuffer(mmap.mmap(self._tally_fd, 0), np.uint64).reshape(count, TALLY_COLUMNS)
        self._stopping = False
        self.signer = Signer(self._key)
        self.info = DataPortInfo(told_host, self._listener.getsockname()[1], self._nonce)
        self._seats = [_Seat(self._spawn(row), time.monotonic()) for row in range(count)]

    @property
    def pids(self) -> list[int]:
        """Of the workers that were alive when last looked at."""
        return [seat.process.pid for seat in self._seats]

    def nbytes(self) -> dict[str, int]:
        """Payload bytes so far, by direction."""
        read, written = self._tallies.sum(axis=0).tolist()
        return {"read": read, "write": written}

    def _spawn(self, row: int) -> subprocess.Popen[bytes]:
        fds = (self._listener.fileno(), self._tally_fd)
        segment = self._segment
        order = Order(segment.path, segment.nbytes, segment.nonce, *fds, row, self._key, self._nonce)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvpool_server.data_plane.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            env={**os.environ, "PYTHONPATH": _path()},
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # It died at once: the next look finds that.
            process.stdin.write(order.encode())
            process.stdin.flush()
        return process

    async def ready(self) -> bool:
        """Waits until a worker accepts, not for long: before that, clients would find a port where nobody answers."""
        outputs = [seat.process.stdout for seat in self._seats if seat.process.stdout is not None]
        return bool(await asyncio.to_thread(lambda: select.select(outputs, [], [], READY_S)[0]))

    async def watch(self) -> None:
        """Replaces workers that die, for ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for row, seat in enumerate(self._seats):
                if (status := seat.process.poll()) is None or self._stopping:
                    continue
                try:
                    self._replace(row, seat, status)
                except (
                    Exception
                ):  # No memory, no process, no file: what killed a worker may keep the next from starting.
                    log.exception("a data worker could not be replaced; it is tried again", next_in_s=REPLACE_S[1])
                    seat.replace_at = time.monotonic() + REPLACE_S[1]

    def _replace(self, row: int, seat: _Seat, status: int) -> None:
        now = time.monotonic()
        if not seat.replace_at:
            seat.deaths = 1 if now - seat.started_at > HEALTHY_S else seat.deaths + 1
            delay_s = min(REPLACE_S[0] * 2 ** (seat.deaths - 1), REPLACE_S[1])
            seat.replace_at = now + delay_s
            log.error("a data worker died", pid=seat.process.pid, status=status, next_in_s=delay_s)
        if now >= seat.replace_at:
            _close(seat.process.stdin)
            _close(seat.process.stdout)
            seat.process, seat.started_at, seat.replace_at = self._spawn(row), now, 0.0

    def stop(self) -> None:
        """Ends all of them, by force where they do not end by themselves. Blocks for a short time. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._listener.close()
        for seat in self._seats:
            _close(seat.process.stdin)
        ends_at = time.monotonic() + END_S
        for seat in self._seats:
            try:
                seat.process.wait(max(0.0, ends_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                seat.process.kill()
                seat.process.wait()
            _close(seat.process.stdout)
        os.close(self._tally_fd)


def _path() -> str:
    """Where a worker imports from: the same release as its server, wherever that was started."""
    parts = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(part for part in parts if part)


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(OSError):
            pipe.close()
