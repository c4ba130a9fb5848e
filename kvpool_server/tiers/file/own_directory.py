"""This server's directory below a tier's path: acquired at the start, kept with heartbeats, released last."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from kvpool.errors import ConfigError
from kvpool_server.tiers.file.lock import DirectoryGoneError, DirectoryLock, acquire
from kvpool_server.tiers.health import ANSWER_S
from kvpool_server.tiers.thread_pool import DaemonThreadPool

log = structlog.get_logger()

RETRY_S = 0.2


class OwnDirectory:
    """See the module.

    Args:
        create: whether to create the root if it does not exist; by default that is an error: a mount may be missing.
        handover_s: how long to wait for a server of the same name to release the directory.

    Attributes:
        path: the directory.
        is_gone: True while another directory, or none, lies at the path.
    """

    def __init__(self, tier_name: str, root: Path, owner: str, create: bool, handover_s: float):
        self.path = root / owner
        self.is_gone = False
        self._tier_name = tier_name
        self._root = root
        self._create = create
        self._handover_s = handover_s
        self._lock: DirectoryLock | None = None

    async def acquire(self, threads: DaemonThreadPool) -> None:
        """Locks the directory; waits for a server of the same name that drains and writes its journal.

        Raises:
            ConfigError: the root does not exist, the directory is another server's, or the file system does not answer.
            OSError: the directory cannot be created or locked.
        """
        ends_at = time.monotonic() + self._handover_s
        is_waiting = False
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    self._lock = await threads.call(self._acquire)
                return
            except TimeoutError:
                raise ConfigError(
                    f"tier {self._tier_name}: the file system does not answer within {ANSWER_S:.0f} s; check the mount "
                    "and its server"
                ) from None
            except BlockingIOError:
                if time.monotonic() >= ends_at:
                    raise ConfigError(
                        f"tier {self._tier_name}: {self.path} belongs to another running server; stop that server, or "
                        "give this one another path or a name= of its own"
                    ) from None
            if not is_waiting:
                is_waiting = True
                log.warning(
                    "a tier waits for another server to release its directory",
                    tier=self._tier_name,
                    directory=str(self.path),
                    left_s=round(ends_at - time.monotonic(), 1),
                )
            await asyncio.sleep(RETRY_S)

    def _acquire(self) -> DirectoryLock:
        if self._create:
            self._root.mkdir(parents=True, exist_ok=True)
        elif not self._root.exists():
            raise ConfigError(
                f"tier {self._tier_name}: {self._root} does not exist; mount it, or add create=yes to create it"
            )
        return acquire(self.path)

    def send_heartbeat(self) -> None:
        """Tells other hosts that the owner lives, and sets `is_gone`. Blocking. Raises OSError if the disk fails."""
        assert self._lock is not None
        try:
            self._lock.send_heartbeat()
            self.is_gone = False
        except DirectoryGoneError as error:
            if not self.is_gone:
                log.error("a tier's directory was removed or replaced", tier=self._tier_name, error=str(error))
            self.is_gone = True

    def release(self) -> None:
        """Unlocks the directory. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
