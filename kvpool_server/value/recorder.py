"""`--record FILE`: lookups and puts as gzip with JSON lines (docs/how-to/value.md), without tokens and names.

Block hashes are replaced by keyed hashes of 64 bits. The key is made at the start and never written: equal blocks have
equal ids within one start of the server, and nobody can test a guessed prompt. Each start appends a gzip member.

The event loop only appends to a bounded queue; a thread hashes, compresses and writes, and stops at `max_bytes`.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import secrets
import stat
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import structlog

from kvpool.errors import ConfigError
from kvpool.types import BlockRun, RunHits
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.traffic import TrafficObserver

log = structlog.get_logger()

MAX_QUEUED_BLOCKS = 262_144
FLUSH_S = 1.0
"""A recorded call is in the file after about this time."""


class Recorder(TrafficObserver):
    """Records into a file from now on, until `close`. Raises ConfigError if the file cannot be written.

    Args:
        max_bytes: bound of the file.
        with_names: also write models and tenants.

    Attributes:
        num_dropped: lookups and puts that were not recorded, because the queue or the file was full.
        nbytes: size of the file.
    """

    def __init__(
        self, path: str, max_bytes: int, with_names: bool = False, clock: Callable[[], float] = time.monotonic
    ):
        self._path, self._max_bytes, self._with_names, self._clock = path, max_bytes, with_names, clock
        self._key, self._started = secrets.token_bytes(32), clock()
        self._file = _open(path)
        self.nbytes, self.num_dropped = os.fstat(self._file).st_size, 0
        self._num_queued = self._num_written = 0  # Blocks; the event loop counts the first, the thread the second.
        self._is_full = self.nbytes >= max_bytes
        if self._is_full:
            log.warning("the recording is full and is not continued; move the file away", path=path, nbytes=self.nbytes)
        self._numbers: dict[bytes, int] = {}
        self._queue: queue.SimpleQueue[tuple[int, PoolNamespace, BlockRun, int | None] | None] = queue.SimpleQueue()
        self._compressor = zlib.compressobj(wbits=31)  # A gzip member.
        self._thread = threading.Thread(target=self._run, name="kvpool-record", daemon=True)
        self._thread.start()

    def looked_up(self, namespace: PoolNamespace, runs: Sequence[BlockRun], hits: Sequence[RunHits]) -> None:
        for run, hit in zip(runs, hits, strict=True):
            self._enqueue(namespace, run, hit.num_leading)

    def put(self, namespace: PoolNamespace, runs: Sequence[BlockRun]) -> None:
        for run in runs:
            self._enqueue(namespace, run, None)

    def _enqueue(self, namespace: PoolNamespace, run: BlockRun, num_hits: int | None) -> None:
        if self._is_full or self._num_queued - self._num_written + len(run) > MAX_QUEUED_BLOCKS:
            self.num_dropped += 1
            return
        self._num_queued += len(run)
        self._queue.put((int(1000 * (self._clock() - self._started)), namespace, run, num_hits))

    def close(self) -> None:
        """Writes what is queued, and closes the file."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write({"kvpool_recording": 1, "started": int(time.time())})
            flush_at = time.monotonic() + FLUSH_S
            while True:
                with suppress(queue.Empty):
                    if (event := self._queue.get(timeout=FLUSH_S)) is None:
                        break
                    self._record(*event)
                    self._num_written += len(event[2])
                if time.monotonic() >= flush_at:
                    self._append(self._compressor.flush(zlib.Z_SYNC_FLUSH))
                    flush_at = time.monotonic() + FLUSH_S
            self._append(self._compressor.flush(zlib.Z_FINISH))
        except OSError as error:
            self._is_full = True
            log.error("recording has stopped: the file cannot be written", path=self._path, why=error.strerror)
        finally:
            os.close(self._file)

    def _record(self, at_ms: int, namespace: PoolNamespace, run: BlockRun, num_hits: int | None) -> None:
        spec, number = namespace.spec, self._numbers.get(namespace.fingerprint)
        if number is None:
            number = self._numbers[namespace.fingerprint] = len(self._numbers)
            tokens, nbytes = zip(*[(group.block_tokens, group.slot_bytes) for group in spec.groups], strict=True)
            described = {"namespace": number, "block_tokens": tokens, "block_bytes": nbytes}
            self._write(described | ({"model": spec.model, "tenant": spec.tenant} if self._with_names else {}))
        salt = number.to_bytes(4, "little") + run.group_idx.to_bytes(4, "little")
        line: dict[str, Any] = {"ms": at_ms, "namespace": number, "group": run.group_idx}
        if run.parent_hash:
            line["parent"] = self._id(salt, run.parent_hash)
        line["put" if num_hits is None else "lookup"] = "".join([self._id(salt, each) for each in run.block_hashes])
        self._write(line if num_hits is None else line | {"hits": num_hits})

    def _id(self, salt: bytes, block_hash: bytes) -> str:
        return hashlib.blake2b(block_hash, digest_size=8, key=self._key, salt=salt + bytes(8)).hexdigest()

    def _write(self, line: dict[str, Any]) -> None:
        self._append(self._compressor.compress(json.dumps(line, separators=(",", ":")).encode() + b"\n"))

    def _append(self, data: bytes) -> None:
        if self._is_full:
            return
        if self.nbytes + len(data) > self._max_bytes:
            self._is_full = True
            log.warning("recording has stopped: the file is full", path=self._path, max_bytes=self._max_bytes)
            return
        self.nbytes += len(data)
        while data:
            data = data[os.write(self._file, data) :]


def _open(path: str) -> int:
    """A descriptor that appends to a private regular file, which is made if it does not exist."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write the recording {path}: {error.strerror}; see --record") from None
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode) or stat.S_IMODE(mode) & 0o077:
        os.close(file)
        raise ConfigError(f"the recording {path} is not a file of its owner alone; chmod 600 it, or name another file")
    return file
