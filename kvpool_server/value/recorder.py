"""`--record FILE`: lookups and puts as gzip with JSON lines (docs/how-to/size.md), without tokens and names.

Block hashes are replaced by keyed hashes of 64 bits. The key is made at the start and never written: equal blocks have
equal ids within one start of the server, and nobody can test a guessed prompt. Each start appends a gzip member.

The event loop only appends to a bounded queue; a thread hashes, compresses and writes, and stops at `max_bytes`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from kvpool.protocol.types import BlockRun, RunHits
from kvpool.security.files import open_private
from kvpool_server.cache.namespaces import PoolNamespace

log = structlog.get_logger()

MAX_QUEUED_BLOCKS = 262_144
FLUSH_S = 1.0
"""Lines stay in the compressor for about this time, or until the next line if that comes later."""


class Recorder:
    """Records into a file from now on, until `close`. Raises ConfigError if the file cannot be opened.

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
        self._key, self._started, self._flush_at = secrets.token_bytes(32), clock(), 0.0
        self._file = open_private(path, os.O_WRONLY | os.O_APPEND, "recording", "--record")
        self.nbytes, self.num_dropped = os.fstat(self._file).st_size, 0
        self._num_queued = self._num_written = 0  # Blocks; the event loop counts the first, the thread the second.
        self._has_stopped = False
        self._numbers: dict[bytes, int] = {}
        self._compressor = zlib.compressobj(wbits=31)  # A gzip member.
        self._thread = ThreadPoolExecutor(1, "kvpool-record")
        self._write({"kvpool_recording": 1, "started": int(time.time())})

    def observe(self, namespace: PoolNamespace, runs: Sequence[BlockRun], hits: Sequence[RunHits] | None) -> None:
        """Queues a lookup or put, as a `TrafficObserver`."""
        at_ms = int(1000 * (self._clock() - self._started))
        for nth, run in enumerate(runs):
            if self._has_stopped or self._num_queued - self._num_written + len(run) > MAX_QUEUED_BLOCKS:
                self.num_dropped += 1
                continue
            self._num_queued += len(run)
            self._thread.submit(self._record, at_ms, namespace, run, None if hits is None else hits[nth].num_leading)

    def close(self) -> None:
        self._thread.shutdown()
        self._append(self._compressor.flush())
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
        self._num_written += len(run)

    def _id(self, salt: bytes, block_hash: bytes) -> str:
        return hashlib.blake2b(block_hash, digest_size=8, key=self._key, salt=salt + bytes(8)).hexdigest()

    def _write(self, line: dict[str, Any]) -> None:
        data = self._compressor.compress(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        if time.monotonic() >= self._flush_at:
            data += self._compressor.flush(zlib.Z_SYNC_FLUSH)
            self._flush_at = time.monotonic() + FLUSH_S
        self._append(data)

    def _append(self, data: bytes) -> None:
        if self._has_stopped:
            return
        try:
            if self.nbytes + len(data) > self._max_bytes:
                raise OSError(errno.EFBIG, "the file is full: record_bytes")
            while data:
                written = os.write(self._file, data)
                data, self.nbytes = data[written:], self.nbytes + written
        except OSError as error:
            self._has_stopped = True
            log.warning("recording has stopped", path=self._path, why=error.strerror)
