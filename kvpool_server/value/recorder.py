"""`--record FILE`: what clients look up and put, without tokens and names, for replays.

The file is gzip with JSON lines, described in docs/how-to/value.md. Block hashes are replaced by keyed hashes of 64
bits. The key is made at the start and never written: equal blocks have equal ids within one start of the server, and
nobody can test a guessed prompt. Each start appends a section of its own, with its own key.

The event loop only appends to a bounded queue; a thread hashes, compresses and writes. The thread writes `max_bytes`
at most, with what the file had before, and then stops for good: a recording without its beginning would miss the blocks
that were stored there.
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
from typing import Any, NamedTuple

import structlog

from kvpool.errors import ConfigError
from kvpool.types import BlockRun, RunHits
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.traffic import TrafficObserver

log = structlog.get_logger()

VERSION = 1
ID_BYTES = 8
MAX_QUEUED_BLOCKS = 262_144
FLUSH_S = 1.0
"""What was recorded is in the file after about so long."""
MAX_LINE_BYTES = 4 << 20
GZIP = 31
"""`wbits` of zlib for gzip members."""
LOOKUP, PUT = "lookup", "put"


class _Event(NamedTuple):
    at_ms: int
    namespace: PoolNamespace
    run: BlockRun
    num_hits: int | None  # None: a put.
    is_first: bool


class Recorder(TrafficObserver):
    """Records into a file from now on, until `close`. Raises ConfigError if the file cannot be written.

    Args:
        max_bytes: bound of the file.
        with_names: also write models and tenants.

    Attributes:
        num_dropped: lookups and puts that were not recorded, because the queue or the file was full.
        nbytes: of the file.
    """

    def __init__(
        self,
        path: str,
        max_bytes: int,
        with_names: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._path = path
        self._max_bytes = max_bytes
        self._with_names = with_names
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._started = clock()
        self._file = _open(path)
        self.nbytes = os.fstat(self._file).st_size
        self.num_dropped = 0
        self._num_queued = 0  # Of the event loop: what it has queued. The thread's own count is `_num_written`.
        self._num_written = 0
        self._is_full = self.nbytes >= max_bytes
        if self._is_full:
            log.warning("the recording is full and is not continued; move the file away", path=path, nbytes=self.nbytes)
        self._numbers: dict[bytes, int] = {}
        self._queue: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._compressor = zlib.compressobj(6, zlib.DEFLATED, GZIP)
        self._thread = threading.Thread(target=self._run, name="kvpool-record", daemon=True)
        self._thread.start()

    def looked_up(self, namespace: PoolNamespace, runs: Sequence[BlockRun], hits: Sequence[RunHits]) -> None:
        at_ms, is_first = int(1000 * (self._clock() - self._started)), True
        for run, hit in zip(runs, hits, strict=True):
            self._enqueue(_Event(at_ms, namespace, run, hit.num_leading, is_first))
            is_first = False

    def put(self, namespace: PoolNamespace, runs: Sequence[BlockRun]) -> None:
        at_ms = int(1000 * (self._clock() - self._started))
        for run in runs:
            self._enqueue(_Event(at_ms, namespace, run, None, False))

    def _enqueue(self, event: _Event) -> None:
        if self._is_full or self._num_queued - self._num_written + len(event.run) > MAX_QUEUED_BLOCKS:
            self.num_dropped += 1
            return
        self._num_queued += len(event.run)
        self._queue.put(event)

    def close(self) -> None:
        """Writes what is queued, and closes the file."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write({"kvpool_recording": VERSION, "started": int(time.time())})
            self._record()
            self._put_bytes(self._compressor.flush(zlib.Z_FINISH))
        except OSError as error:
            self._is_full = True
            log.error("recording has stopped: the file cannot be written", path=self._path, why=error.strerror)
        finally:
            os.close(self._file)

    def _record(self) -> None:
        flush_at = time.monotonic() + FLUSH_S
        while True:
            try:
                event = self._queue.get(timeout=FLUSH_S)
            except queue.Empty:
                event = None
            else:
                if event is None:
                    return
                if not self._is_full:
                    self._write_event(event)
                self._num_written += len(event.run)
            if time.monotonic() >= flush_at:
                self._put_bytes(self._compressor.flush(zlib.Z_SYNC_FLUSH))
                flush_at = time.monotonic() + FLUSH_S

    def _write_event(self, event: _Event) -> None:
        run, namespace = event.run, event.namespace
        number = self._numbers.get(namespace.fingerprint)
        if number is None:
            number = self._numbers[namespace.fingerprint] = len(self._numbers)
            self._write(self._describe(number, namespace))
        salt = number.to_bytes(4, "little") + run.group_idx.to_bytes(4, "little")
        line: dict[str, Any] = {"ms": event.at_ms, "namespace": number, "group": run.group_idx}
        if run.parent_hash:
            line["parent"] = self._id(salt, run.parent_hash)
        line[PUT if event.num_hits is None else LOOKUP] = "".join([self._id(salt, each) for each in run.block_hashes])
        if event.num_hits is not None:
            line["hits"] = event.num_hits
        self._write(line)

    def _describe(self, number: int, namespace: PoolNamespace) -> dict[str, Any]:
        groups = namespace.spec.groups
        described: dict[str, Any] = {
            "namespace": number,
            "block_tokens": [group.block_tokens for group in groups],
            "block_bytes": [group.slot_bytes for group in groups],
        }
        if self._with_names:
            described |= {"model": namespace.spec.model, "tenant": namespace.spec.tenant}
        return described

    def _id(self, salt: bytes, block_hash: bytes) -> str:
        return hashlib.blake2b(block_hash, digest_size=ID_BYTES, key=self._key, salt=salt + bytes(8)).hexdigest()

    def _write(self, line: dict[str, Any]) -> None:
        self._put_bytes(self._compressor.compress(json.dumps(line, separators=(",", ":")).encode() + b"\n"))

    def _put_bytes(self, data: bytes) -> None:
        if not data or self._is_full:
            return
        if self.nbytes + len(data) > self._max_bytes:
            self._is_full = True
            log.warning("recording has stopped: the file is full", path=self._path, max_bytes=self._max_bytes)
            return
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self.nbytes += len(data)


def _open(path: str) -> int:
    """A descriptor that appends to a private regular file, which is made if it does not exist."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write the recording {path}: {error.strerror}; see --record") from None
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise ConfigError(f"the recording {path} is not a file; give --record a file")
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.close(file)
        mode = oct(stat.S_IMODE(found.st_mode))[2:]
        raise ConfigError(f"others may read or write the recording {path} (mode {mode}); chmod 600 it")
    return file
