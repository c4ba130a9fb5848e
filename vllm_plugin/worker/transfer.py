"""The worker's send and receive threads: each executes queued jobs, and reports every job, whatever happens.

A failed job is reported like a successful one, with its outcome: an engine must never wait for a thread for ever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, Generic, TypeVar

from vllm.logger import init_logger

from kvpool.client.rpc import Namespace
from kvpool.client.tracing import Tracing
from kvpool.protocol.errors import (
    InvalidRequestError,
    KVPoolError,
    LeaseExpiredError,
    OutOfSpaceError,
    TransferError,
    UnavailableError,
)
from kvpool.protocol.types import PutStatus
from kvpool.transport.base import Buffers
from kvpool.transport.chunk_sums import Checksums
from vllm_plugin.metadata import GroupBlocks, LoadJob, StoreJob, own_clock
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.groups import RankShards
from vllm_plugin.session import Session
from vllm_plugin.worker.copy import Copier

logger = init_logger("vllm.kvpool.transfer")

Job = TypeVar("Job", LoadJob, StoreJob)

MIN_LOAD_S = 1e-6
"""A load takes some time; 0 would say that it has not ended."""
PUT_BYTES = 64 << 20
"""A larger store is cut into puts of this size: each put is stored as a whole or not at all."""


class TransferThread(threading.Thread, Generic[Job]):
    """One direction of one rank.

    Args:
        timeout_s: a job that takes longer fails.
        mine: what this rank holds of each group.
        tracing: makes a span of each job; None: nothing does.
    """

    _call = ""
    """As `Session.report` names the thread's jobs."""

    def __init__(
        self,
        name: str,
        timeout_s: float,
        session: Session,
        copier: Copier,
        mine: Sequence[RankShards],
        stage: int,
        recorder: Recorder,
        tracing: Tracing | None = None,
    ):
        super().__init__(name=name, daemon=True)
        self._tracing = tracing
        self._timeout_s = timeout_s
        self._session = session
        self._copier = copier
        self._mine = mine
        self._stage = stage
        self._recorder = recorder
        self._turns: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued: dict[int, tuple[Job, Any]] = {}  # By turn; a job that is dropped leaves its turn behind.
        self._num_submitted = 0
        self._ended: list[tuple[Job, bool]] = []
        self._stopping = False
        self.start()

    def submit(self, job: Job) -> None:
        """Queues a job; its copies begin once the device has done what it has been given so far."""
        mark = self._copier.mark()
        with self._lock:
            self._num_submitted += 1
            self._queued[self._num_submitted] = job, mark
        self._turns.put(self._num_submitted)

    def take_ended(self) -> list[tuple[Job, bool]]:
        """Jobs that have ended since the last call, and whether each succeeded."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def request_stop(self) -> None:
        """Lets the job under way end, and drops the queued ones."""
        self._stopping = True
        self._turns.put(None)

    def run(self) -> None:
        while (turn := self._turns.get()) is not None and not self._stopping:
            with self._lock:
                if turn not in self._queued:
                    continue
                job, mark = self._queued.pop(turn)
            succeeded = False
            try:
                succeeded = self._transfer(job, mark) if self._tracing is None else self._traced(job, mark)
            except Exception as error:
                self._recorder.guard.failed(f"a {self._call}", error)
                with self._recorder.guard.part("the report of a failure"):  # The job is reported in any case.
                    self._session.report(TransferError(f"a {self._call} ended with {type(error).__name__}"), self._call)
            with self._lock:
                self._ended.append((job, succeeded))

    def _transfer(self, job: Job, mark: Any) -> bool:
        raise NotImplementedError

    def _traced(self, job: Job, mark: Any) -> bool:
        """As `_transfer`, with a span that is the parent of the job's calls."""
        assert self._tracing is not None
        attributes: dict[str, str | int] = {"kvpool.blocks": sum(map(len, job.groups)), "kvpool.thread": self.name}
        with self._tracing.span(f"kvpool.{self._call}.rank", job.traceparent, attributes) as span:
            succeeded = self._transfer(job, mark)
            if not succeeded:
                self._tracing.fail(span, f"{self._call} failed")
            return succeeded

    def _namespace(self, weights_epoch: str) -> Namespace:
        namespace = self._session.namespace
        if namespace is None:
            raise UnavailableError("kvpool is away")
        if namespace.spec.weights_epoch != weights_epoch:
            raise InvalidRequestError("the engine has moved to another namespace since this transfer was scheduled")
        return namespace


class SendThread(TransferThread[StoreJob]):
    """Stores blocks of the engine in the pool."""

    _call = "store"

    def drop(self, job_ids: Collection[int]) -> None:
        """Ends jobs that have not begun, without storing them."""
        with self._lock:
            for turn, (job, _) in list(self._queued.items()):
                if job.job_id in job_ids:
                    del self._queued[turn]
                    self._ended.append((job, False))

    def _transfer(self, job: StoreJob, mark: Any) -> bool:
        started, ends_at = time.perf_counter(), time.monotonic() + self._timeout_s
        try:
            namespace = self._namespace(job.weights_epoch)
            num_busy = sum(self._put(namespace, part, mark, ends_at) for part in job.groups)
        except KVPoolError as error:
            self._session.report(error, "store")
            self._recorder.add("store_failures")
            if not isinstance(error, UnavailableError | OutOfSpaceError):
                logger.warning("kvpool: %d KV blocks were not stored in the pool: %s", sum(map(len, job.groups)), error)
            return False
        self._session.report(None, "store")
        self._recorder.observe("store_seconds", time.perf_counter() - started)
        return not num_busy

    def _put(self, namespace: Namespace, part: GroupBlocks, mark: Any, ends_at: float) -> int:
        """Stores one group's blocks; returns how many are left out, or still being stored by others, who may fail."""
        num_busy = 0
        shards = self._mine[part.group_idx].shards
        chunk_bytes = namespace.spec.groups[part.group_idx].chunk_bytes
        max_blocks = max(1, min(PUT_BYTES // (shards.count * chunk_bytes), namespace.max_blocks(shards)))
        for start, runs in part.pieces(max_blocks):

            def fill(indices: Sequence[int], buffers: Buffers, start: int = start) -> Checksums | None:
                rows = [[row[start + idx] for idx in indices] for row in part.block_ids]
                return self._copier.gather(mark, part.group_idx, rows, buffers)

            if time.monotonic() >= ends_at:  # The pool is slow, and has served what was begun.
                return num_busy + 1
            count = sum(map(len, runs))
            mine = [row[start : start + count] for row in part.block_ids]
            result = self._session.client.put(
                namespace,
                runs,
                self._copier.in_place(part.group_idx, mine) or fill,
                shards=shards,
                batch_bytes=self._copier.batch_bytes,
                fill_sums=self._copier.sums(part.group_idx),
                out_of_process=self._copier.sums(part.group_idx),
            )
            granted = result.statuses.count(PutStatus.GRANTED)
            self._recorder.add("stored_blocks", granted)
            self._recorder.add("stored_bytes", result.nbytes)
            self._recorder.add("store_skipped_blocks", len(result.statuses) - granted)
            num_busy += result.statuses.count(PutStatus.BUSY)
        return num_busy


class ReceiveThread(TransferThread[LoadJob]):
    """Loads leased blocks from the pool into the engine."""

    _call = "load"

    def _transfer(self, job: LoadJob, mark: Any) -> bool:
        started, began, ends_at = time.perf_counter(), self._copier.now(), time.monotonic() + self._timeout_s
        try:
            namespace = self._namespace(job.weights_epoch)
            gone = sum(self._get(namespace, job, part, mark, ends_at) for part in job.groups)
            if not job.groups:
                raise LeaseExpiredError("vLLM allocated blocks for a part of the hit that cannot be resumed")
        except KVPoolError as error:
            job.is_unserved = not isinstance(error, LeaseExpiredError | InvalidRequestError)
            self._session.report(error, "load")
            logger.warning(
                "kvpool: a load of %d KV blocks failed, so their request will be computed: %s", _count(job), error
            )
            self._recorder.add("load_failures")
            return False
        finally:
            self._copier.wait_scattered()  # Nothing may reach the engine's blocks once the job has been reported.
            seconds = time.perf_counter() - started
            # A forward pass that the load has waited for says nothing of the link, and computing would wait for it too.
            # What was read meanwhile counts as free: it is as much as the copier stages.
            job.seconds = max(MIN_LOAD_S, seconds - self._copier.seconds_between(began, mark))
        if gone:
            logger.warning("kvpool: %d of %d KV blocks of a load left the pool; vLLM computes them", gone, _count(job))
            self._recorder.add("load_failures")
            return False
        self._session.report(None, "load")
        self._recorder.add("loaded_blocks", _count(job))
        self._recorder.observe("load_seconds", seconds)
        return True

    def _get(self, namespace: Namespace, job: LoadJob, part: GroupBlocks, mark: Any, ends_at: float) -> int:
        """Loads one group's blocks; returns how many are no longer in the pool."""
        shards = self._mine[part.group_idx].shards

        def drain(indices: Sequence[int], buffers: Buffers) -> Checksums | None:
            rows = [[row[idx] for idx in indices] for row in part.block_ids]
            return self._copier.scatter(mark, part.group_idx, rows, buffers)

        located = self._session.client.get(
            namespace,
            job.lease_ids[self._stage],
            part.runs,
            self._copier.in_place(part.group_idx, part.block_ids) or drain,
            shards=shards,
            ends_at=ends_at,
            batch_bytes=self._copier.batch_bytes,
            drain_sums=self._copier.sums(part.group_idx),
            leased=part.leased[self._stage] if part.leased and job.clock and job.clock == own_clock() else None,
            out_of_process=self._copier.sums(part.group_idx),
        )
        present = sum(located.present)
        self._recorder.add("loaded_bytes", present * shards.count * namespace.spec.groups[part.group_idx].chunk_bytes)
        return len(part) - present


def _count(job: LoadJob) -> int:
    return sum(map(len, job.groups))
