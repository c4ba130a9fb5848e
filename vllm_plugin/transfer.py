"""The worker's send and receive threads: each takes jobs from a queue and reports every one of them, whatever happens.

A job that fails is reported like one that succeeds, with its outcome: an engine must never wait for a thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from vllm.logger import init_logger

from kvpool.client import Namespace
from kvpool.errors import KVPoolError, OutOfSpaceError, UnavailableError
from kvpool.transport.base import Buffers
from kvpool.types import BlockRun, PutStatus, ShardRange
from vllm_plugin.copy import Copier
from vllm_plugin.metadata import LoadJob, StoreJob
from vllm_plugin.metrics import Recorder
from vllm_plugin.session import Session

logger = init_logger("vllm.kvpool.transfer")

Job = TypeVar("Job", LoadJob, StoreJob)

PUT_BYTES = 64 << 20
"""A store of more is cut into puts of this size: all or nothing should not be too much."""


class TransferThread(threading.Thread, Generic[Job]):
    """One direction of one rank."""

    def __init__(self, name: str, session: Session, copier: Copier, shards: ShardRange, recorder: Recorder):
        super().__init__(name=name, daemon=True)
        self._session = session
        self._copier = copier
        self._shards = shards
        self._recorder = recorder
        self._jobs: queue.SimpleQueue[tuple[Job, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended: list[tuple[Job, bool]] = []
        self._stopping = False
        self.start()

    def submit(self, job: Job) -> None:
        """Queues a job; it begins once what the device has been given so far is done."""
        self._jobs.put((job, self._copier.mark()))

    def take_ended(self) -> list[tuple[Job, bool]]:
        """Jobs that have ended since the last call, and whether each succeeded."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def request_stop(self) -> None:
        """Lets the job under way end, and drops the others."""
        self._stopping = True
        self._jobs.put(None)

    def run(self) -> None:
        while (taken := self._jobs.get()) is not None and not self._stopping:
            job, mark = taken
            succeeded = False
            try:
                succeeded = self._transfer(job, mark)
            except Exception:
                logger.exception("kvpool: a transfer failed in an unforeseen way; the engine goes on without it")
            with self._lock:
                self._ended.append((job, succeeded))

    def _transfer(self, job: Job, mark: Any) -> bool:
        raise NotImplementedError

    def _namespace(self) -> Namespace:
        namespace = self._session.namespace
        if namespace is None:
            self._copier.adopt(None)
            raise UnavailableError("kvpool is away")
        self._copier.adopt(namespace.transport.memory)
        return namespace


class SendThread(TransferThread[StoreJob]):
    """Stores blocks of the engine in the pool."""

    def _transfer(self, job: StoreJob, mark: Any) -> bool:
        started = time.perf_counter()
        try:
            namespace = self._namespace()
            for start, run in _cut(job.run, namespace, self._shards):
                self._put(namespace, job, start, run, mark)
        except KVPoolError as error:
            self._session.report(error)
            self._recorder.add("store_failures")
            if not isinstance(error, UnavailableError | OutOfSpaceError):
                logger.warning("kvpool: %d blocks were not stored: %s", len(job.run), error)
            return False
        self._session.report(None)
        self._recorder.observe("store_seconds", time.perf_counter() - started)
        return True

    def _put(self, namespace: Namespace, job: StoreJob, start: int, run: BlockRun, mark: Any) -> None:
        def fill(indices: Sequence[int], buffers: Buffers) -> None:
            self._copier.gather(mark, [job.block_ids[start + idx] for idx in indices], buffers)

        result = self._session.client.put(
            namespace, [run], fill, shards=self._shards, batch_bytes=self._copier.batch_bytes
        )
        granted = result.statuses.count(PutStatus.GRANTED)
        self._recorder.add("stored_blocks", granted)
        self._recorder.add("stored_bytes", result.nbytes)
        self._recorder.add("store_skipped_blocks", len(run) - granted)


class ReceiveThread(TransferThread[LoadJob]):
    """Loads leased blocks from the pool into the engine."""

    def _transfer(self, job: LoadJob, mark: Any) -> bool:
        started = time.perf_counter()

        def drain(indices: Sequence[int], buffers: Buffers) -> None:
            self._copier.scatter(mark, [job.block_ids[idx] for idx in indices], buffers)
            if indices[-1] == len(job.run) - 1:
                self._copier.settle()  # Before `get` looks whether the lease has lasted.

        try:
            namespace = self._namespace()
            located = self._session.client.get(
                namespace, job.lease_id, [job.run], drain, shards=self._shards, batch_bytes=self._copier.batch_bytes
            )
        except KVPoolError as error:
            self._session.report(error)
            logger.warning("kvpool: a load of %d blocks failed, they will be computed: %s", len(job.run), error)
            self._recorder.add("load_failures")
            return False
        finally:
            self._copier.settle()  # Nothing may reach the engine's blocks once the job has been reported.
        self._session.report(None)
        if not all(located.present):
            gone = len(located.present) - sum(located.present)
            logger.warning("kvpool: %d of %d blocks are gone, they will be computed", gone, len(job.run))
            self._recorder.add("load_failures")
            return False
        group = namespace.spec.groups[job.run.group_idx]
        self._recorder.add("loaded_blocks", len(job.run))
        self._recorder.add("loaded_bytes", len(job.run) * self._shards.count * group.chunk_bytes)
        self._recorder.observe("load_seconds", time.perf_counter() - started)
        return True


def _cut(run: BlockRun, namespace: Namespace, shards: ShardRange) -> list[tuple[int, BlockRun]]:
    """Parts of a run that are put at once, each with its first block's position."""
    chunk_bytes = namespace.spec.groups[run.group_idx].chunk_bytes
    step = max(1, min(PUT_BYTES // (shards.count * chunk_bytes), namespace.max_batch_blocks))
    parts = []
    for start in range(0, len(run), step):
        parent = run.block_hashes[start - 1] if start else run.parent_hash
        parts.append((start, BlockRun(run.group_idx, run.block_hashes[start : start + step], parent)))
    return parts
