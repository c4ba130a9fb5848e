"""The data workers of a server: starts them, replaces those that die, ends them. Owned by the event loop's thread."""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import select
import socket
import subprocess
import time
from dataclasses import dataclass

import numpy as np
import structlog

from kvpool.protocol.types import NONCE_BYTES
from kvpool.transport.child_process import ChildProcess
from kvpool.transport.segment import Segment, sealed_file
from kvpool_server.data_plane.permits import PermitTable
from kvpool_server.data_plane.worker import TALLY_COLUMNS

log = structlog.get_logger()

BACKLOG = 128
LOOK_EVERY_S = 0.25
READY_S = 3.0
END_S = 2.0
REPLACE_S = (0.1, 10.0)
"""Delay between a worker's death and its replacement: the first, and the longest. Each death in a row doubles it."""
HEALTHY_S = 60.0
"""A worker that lived longer did not die of its start: the delay begins anew."""


def default_count() -> int:
    """Workers for this machine: one for four cores, four at most. Each worker has an interpreter lock of its own."""
    return min(4, max(1, len(os.sched_getaffinity(0)) // 4))


@dataclass(slots=True)
class _WorkerState:
    """One worker. `replace_at` is when the next process starts; 0 while this one runs."""

    process: ChildProcess
    started_at: float
    deaths: int = 0
    replace_at: float = 0.0


class DataWorkers:
    """A listening socket, and the processes that accept from it. Raises OSError if the address cannot be listened on.

    Args:
        host, port: where to listen; port 0 takes a free one.
        segment: the arena's; open as long as the workers.
        permits: which permits the workers accept. It says how many workers there are.

    Attributes:
        told_host, port, nonce, sealed: what clients are told: where to connect (an empty host is that of the server's
            endpoint), the name of this boot, and whether connections are encrypted.
    """

    def __init__(self, host: str, port: int, told_host: str, segment: Segment, permits: PermitTable):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._segment = segment
        self._permits, count = permits, permits.num_workers
        self.told_host, self.port = told_host, self._listener.getsockname()[1]
        self.nonce, self.sealed = secrets.token_bytes(NONCE_BYTES), permits.sealed
        self._tally_fd = sealed_file("kvpool-data-tally", count * TALLY_COLUMNS * 8)
        self._tallies = np.frombuffer(mmap.mmap(self._tally_fd, 0), np.uint64).reshape(count, TALLY_COLUMNS)
        self._is_stopping = False
        self._workers = [_WorkerState(self._spawn(row), time.monotonic()) for row in range(count)]

    @property
    def pids(self) -> list[int]:
        """Process ids, of which some may have died since the last look."""
        return [worker.process.pid for worker in self._workers]

    def nbytes(self) -> dict[str, int]:
        """Payload bytes so far, by direction."""
        read, written = self._tallies.sum(axis=0).tolist()
        return {"read": read, "write": written}

    def _spawn(self, row: int) -> ChildProcess:
        segment, permits = self._segment, self._permits
        fds = {
            "segment_fd": segment.fd,
            "listen_fd": self._listener.fileno(),
            "tally_fd": self._tally_fd,
            "entries_fd": permits.entries_fd,
            "words_fd": permits.words_fd,
        }
        told = {"nbytes": segment.nbytes, "row": row, "key": permits.key, "nonce": self.nonce, "sealed": self.sealed}
        module = "kvpool_server.data_plane.worker"
        return ChildProcess(module, {**fds, **told}, list(fds.values()), stdout=subprocess.PIPE)

    async def ready(self) -> bool:
        """Waits until a worker accepts connections, READY_S at most; False if none does."""
        outputs = [worker.process.stdout for worker in self._workers if worker.process.stdout is not None]
        return bool(await asyncio.to_thread(lambda: select.select(outputs, [], [], READY_S)[0]))

    async def watch(self) -> None:
        """Replaces workers that die, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for row, worker in enumerate(self._workers):
                if (status := worker.process.poll()) is None or self._is_stopping:
                    continue
                try:
                    self._replace(row, worker, status)
                except Exception:  # No memory, process or descriptor: what killed a worker may prevent its replacement.
                    log.exception("a data worker cannot be replaced; the server retries", next_in_s=REPLACE_S[1])
                    worker.replace_at = time.monotonic() + REPLACE_S[1]

    def _replace(self, row: int, worker: _WorkerState, status: int) -> None:
        now = time.monotonic()
        if not worker.replace_at:
            self._permits.worker_ended(row)
            worker.deaths = 1 if now - worker.started_at > HEALTHY_S else worker.deaths + 1
            delay_s = min(REPLACE_S[0] * 2 ** (worker.deaths - 1), REPLACE_S[1])
            worker.replace_at = now + delay_s
            log.error("a data worker died", pid=worker.process.pid, status=status, next_in_s=delay_s)
        if now >= worker.replace_at:
            worker.process.end(0.0)
            worker.process, worker.started_at, worker.replace_at = self._spawn(row), now, 0.0

    def stop(self) -> None:
        """Ends all workers; kills those that take longer than END_S. Blocks that long at most. Idempotent."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._listener.close()
        for worker in self._workers:
            worker.process.request_end()
        ends_at = time.monotonic() + END_S
        for worker in self._workers:
            worker.process.end(max(0.0, ends_at - time.monotonic()))
        os.close(self._tally_fd)
