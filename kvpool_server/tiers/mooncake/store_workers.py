"""Mooncake's client, several times: processes that share a tier's calls, each replaced when it has died or hangs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import structlog

from kvpool_server.tiers.mooncake.messages import Call
from kvpool_server.tiers.mooncake.store_process import StoreChannel, StoreError, StoreProcess
from kvpool_server.tiers.mooncake.worker import StoreConfig

log = structlog.get_logger()

RESTART_AFTER_S = 5.0
"""How long after a start that failed a process is started again beside others that work."""


class StoreWorkers:
    """The processes of one tier. Thread-safe; every call blocks.

    Args:
        config: the first process alone gives the segment to the cluster.
        num_transfers: transfers under way at once, over all processes.
    """

    def __init__(self, config: StoreConfig, num_workers: int, num_transfers: int):
        self.num_workers = num_workers
        self._name = f"mooncake:{config.master}"
        self._configs = [config, *[replace(config, segment_bytes=0)] * (num_workers - 1)]
        self._num_channels = -(-num_transfers // num_workers)
        self._processes: list[StoreProcess | None] = [None] * num_workers
        self._start_locks = [threading.Lock() for _ in range(num_workers)]
        self._lock = threading.Lock()
        self._num_calls = [0] * num_workers
        self._restart_at = [0.0] * num_workers
        self._is_closed = False

    def start(self, nth: int) -> StoreProcess:
        """The process, started if it does not run. Raises StoreError."""
        with self._start_locks[nth]:
            if self._is_closed:
                raise StoreError("the tier is closed")
            process = self._processes[nth]
            if process is not None and process.is_alive:
                return process
            if process is not None:
                log.error("Mooncake's client process has died and is started again", tier=self._name, worker=nth)
                process.end()
            try:
                process = StoreProcess(self._configs[nth], self._num_channels)
            except OSError as error:
                raise StoreError(str(error)) from None
            if self._is_closed:
                process.end()
                raise StoreError("the tier is closed")
            self._processes[nth] = process
            return process

    def transfer(self, move: Callable[[StoreChannel], list[int]]) -> list[int]:
        """Has a channel with staging memory move bytes. Raises StoreError.

        Args:
            move: is called again, with another process's channel, if the process dies meanwhile.
        """
        return self._with_channel(StoreProcess.transfer_channel, move)

    def ask(self, what: Call, keys: Sequence[str]) -> list[int]:
        """Mooncake's code for each key of a call that moves no bytes. Raises StoreError."""
        return self._with_channel(StoreProcess.question_channel, lambda channel: channel.call(what, keys))

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started."""
        return [process.pid for process in self._processes if process is not None]

    def close(self) -> None:
        """Lets every process leave the cluster, END_S at most; calls under way get StoreError. Idempotent."""
        self._is_closed = True
        processes = [process for process in self._processes if process is not None]
        for process in processes:
            process.request_end()
        for process in processes:
            process.end()

    def _with_channel(
        self,
        channel_of: Callable[[StoreProcess], AbstractContextManager[StoreChannel]],
        work: Callable[[StoreChannel], list[int]],
    ) -> list[int]:
        for is_last in (False, True):
            with self._chosen() as nth:
                process = self.start(nth)
                try:
                    with channel_of(process) as channel:
                        return work(channel)
                except StoreError:
                    if is_last or self._is_closed:
                        raise
        raise AssertionError("the last try returns or raises")

    @contextlib.contextmanager
    def _chosen(self) -> Iterator[int]:
        """The process with the fewest calls under way, of those that run if any does."""
        with self._lock:
            running = [nth for nth, process in enumerate(self._processes) if process is not None and process.is_alive]
            chosen = min(running or range(self.num_workers), key=self._num_calls.__getitem__)
            self._num_calls[chosen] += 1
            dead = set(range(self.num_workers)) - set(running) if running else set()
            due = [nth for nth in dead if time.monotonic() >= self._restart_at[nth]]
            for nth in due:
                self._restart_at[nth] = float("inf")
        for nth in due:
            threading.Thread(target=self._restart, args=(nth,), name="kvpool-tier-mooncake-start", daemon=True).start()
        try:
            yield chosen
        finally:
            with self._lock:
                self._num_calls[chosen] -= 1

    def _restart(self, nth: int) -> None:
        """Starts a process beside others that work."""
        try:
            self.start(nth)
        except StoreError as error:
            log.error("Mooncake's client process does not start", tier=self._name, worker=nth, error=str(error))
        finally:
            self._restart_at[nth] = time.monotonic() + RESTART_AFTER_S
