"""The worker's side of the connector: hands each step's jobs to its threads, and reports the jobs that have ended.

Only the model runner's thread calls it, and no call waits.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.logger import init_logger

from kvpool.client.tracing import tracing_of
from kvpool.protocol.namespace import NamespaceSpec
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metadata import ConnectorMetadata, Handshake, LoadJob, StoreJob, WorkerMetadata
from vllm_plugin.metrics import KVPoolStats, Recorder
from vllm_plugin.model.groups import group_spec, make_groups, rank_shards, scheduler_knows
from vllm_plugin.model.identity import namespace_spec
from vllm_plugin.session import Session
from vllm_plugin.worker.copy import make_copier, make_layout
from vllm_plugin.worker.loaded_weights import LoadedWeights
from vllm_plugin.worker.transfer import ReceiveThread, SendThread

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpool.worker")

STOP_TIMEOUT_S = 2.0


class KVPoolWorker:
    """One rank.

    Attributes:
        sender, receiver: threads; None until the KV cache is registered.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: ConnectorConfig,
        tp_rank: int,
        stage: int = 0,
    ):
        tp_size = vllm_config.parallel_config.tensor_parallel_size
        num_stages = vllm_config.parallel_config.pipeline_parallel_size
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._groups = make_groups(vllm_config, kv_cache_config)
        self._group_specs = [
            group_spec(group, vllm_config, kv_cache_config, config.num_shards) for group in self._groups
        ]
        self._mine = [rank_shards(group, tp_rank, tp_size) for group in self._group_specs]
        self._spec: Future[NamespaceSpec] = Future()
        self._weights_epoch = config.weights_epoch
        self._stage, self._tp_rank = stage, tp_rank
        self.weights = LoadedWeights(vllm_config)
        self._weights_check = 0  # Number of the newest check of the weights.
        self._tell_spec = not scheduler_knows(vllm_config, kv_cache_config)
        # A draft model writes its own layers after the hooks of a step, into the blocks of that step.
        self._hold_stores = vllm_config.speculative_config is not None
        self._held: list[StoreJob] = []
        self._name = f"worker {tp_rank}" if num_stages == 1 else f"worker {stage}.{tp_rank}"
        self._recorder = Recorder()
        self.guard = self._recorder.guard
        self._ended_loads: list[tuple[LoadJob, bool]] = []  # To be reported, and whether each succeeded.
        self.session = Session(config.client_config(tp_size * num_stages), self._spec, self._name, self._recorder)
        self._tracing = tracing_of(config.client_config())
        self.sender: SendThread | None = None
        self.receiver: ReceiveThread | None = None
        self._is_spec_reported = False  # The scheduler compares the namespace with its own.
        self._report = WorkerMetadata()
        # Reading the files of large weights takes long: the engine warms up meanwhile.
        threading.Thread(target=self._name_spec, args=(vllm_config,), name="kvpool-naming", daemon=True).start()

    @property
    def spec(self) -> NamespaceSpec:
        """The namespace of this rank's pipeline stage; waits until the files of the weights are read."""
        return replace(self._spec.result(), weights_epoch=self._weights_epoch)

    def _name_spec(self, vllm_config: VllmConfig) -> None:
        try:
            self._spec.set_result(namespace_spec(vllm_config, self._kv_cache_config, self._config, self._stage))
        except Exception as error:  # Of any kind: others wait for the result.
            self._spec.set_exception(error)
            logger.error("kvpool is off for this engine: %s cannot name its namespace: %s", self._name, error)

    def handshake(self) -> Handshake | None:
        """The stage's namespace, where the scheduler's side cannot derive it."""
        return Handshake(self.spec) if self._tell_spec else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learns where the KV cache lies, and starts the send and receive threads."""
        layouts = []
        for group, spec, mine in zip(self._groups, self._group_specs, self._mine, strict=True):
            layers = [list(self._kv_cache_config.kv_cache_groups[member].layer_names) for member in group.members]
            layout = make_layout(kv_caches, layers, self._kv_cache_config.num_blocks, mine.shards.count)
            if layout.chunk_bytes != spec.chunk_bytes:
                raise ValueError(
                    f"a shard of a block of {spec.kind} has {layout.chunk_bytes} bytes in the KV cache, and "
                    f"{spec.chunk_bytes} in the pool's namespace: this vLLM lays out its KV cache in a way that kvpool "
                    "does not know; serve without kvpool"
                )
            layouts.append(layout)
        self._check_weights()
        copier = make_copier(layouts)
        # Pinning tens of gigabytes of the pool's memory takes a second, which the first request should not wait for.
        self.session.when_open(lambda opened: copier.adopt(None if opened is None else opened.transport.memory))
        threads = (self.session, copier, self._mine, self._stage, self._recorder, self._tracing)
        self.sender = SendThread(f"kvpool-send-{self._name}", self._config.store_timeout_ms / 1000, *threads)
        self.receiver = ReceiveThread(f"kvpool-receive-{self._name}", self._config.load_timeout_ms / 1000, *threads)

    def start_loads(self, metadata: ConnectorMetadata) -> None:
        if metadata.weights_check > self._weights_check:
            self._weights_check = metadata.weights_check
            self._check_weights()
        with self.guard.part("the move to another namespace"):
            # Until the files of the weights are read, no namespace is open: jobs fail, and a later step moves.
            if metadata.weights_epoch != self._weights_epoch and self._spec.done():
                self._weights_epoch = metadata.weights_epoch
                self.session.move(self.spec)
        with self.guard.part("dropping stores"):
            if metadata.dropped_stores:
                self._drop(metadata.dropped_stores)
        held, self._held = self._held, []
        self._submit(held)
        for job in metadata.loads:
            with self.guard.part("the start of a load") as start:
                assert self.receiver is not None
                self.receiver.submit(job)
            if start.failed:
                self._ended_loads.append((job, False))

    def start_stores(self, metadata: ConnectorMetadata) -> None:
        """Queues the step's stores, once its forward pass has been launched on the device."""
        if self._hold_stores:
            self._held += metadata.stores
        else:
            self._submit(metadata.stores)

    def _drop(self, job_ids: list[int]) -> None:
        """Ends jobs that have not begun: the engine lacks the blocks that they pin."""
        assert self.sender is not None
        self.sender.drop(job_ids)
        for job in [job for job in self._held if job.job_id in job_ids]:
            self._held.remove(job)
            self._end(job, succeeded=False)

    def _submit(self, jobs: list[StoreJob]) -> None:
        for job in jobs:
            with self.guard.part("the start of a store") as start:
                assert self.sender is not None
                # A rank with a replica of the heads stores nothing: another rank stores the same bytes.
                groups = [part for part in job.groups if self._mine[part.group_idx].writes]
                if groups:
                    self.sender.submit(replace(job, groups=groups))
            if start.failed or not groups:
                self._end(job, succeeded=not start.failed)

    def transfer_results(self) -> base.KVConnectorTransferResults:
        """Loads that have ended. A failed load is in both sets, so that vLLM computes its request from the start."""
        results = base.KVConnectorTransferResults()
        if self.receiver is not None:
            self._ended_loads += self.receiver.take_ended()
        for job, succeeded in self._ended_loads:
            results.finished_recving.add(job.request_id)
            self._report.load_seconds[job.request_id] = job.seconds
            if not succeeded:
                results.failed_recving.add(job.request_id)
            if job.is_unserved:
                self._report.unserved_loads.add(job.request_id)
        self._ended_loads = []  # Last: vLLM waits for every load to be reported.
        return results

    def worker_metadata(self) -> WorkerMetadata | None:
        if self.sender is not None:
            for job, succeeded in self.sender.take_ended():
                self._end(job, succeeded)
        if not self._is_spec_reported and self._spec.done():
            self._is_spec_reported = True
            # A rank whose namespace has no name agrees with no scheduler.
            fingerprint = b"" if self._spec.exception() else self._spec.result().fingerprint()
            self._report.namespaces = frozenset({(self._stage, fingerprint)})
        report, self._report = self._report, WorkerMetadata()
        return report if report != WorkerMetadata() else None

    def stats(self) -> KVPoolStats | None:
        return self._recorder.take()

    def shutdown(self) -> None:
        """Ends the connection and the threads, without waiting for the pool. Idempotent."""
        threads = [thread for thread in (self.sender, self.receiver) if thread is not None]
        for thread in threads:
            thread.request_stop()
        with self.guard.part("the end of a session"):
            self.session.close()  # Ends the calls that a thread may be waiting for.
        for thread in threads:
            thread.join(STOP_TIMEOUT_S)

    def _check_weights(self) -> None:
        """Reports the digest of the weights, which nothing changes while the thread that runs the model is here."""
        self._report.weights |= {(self._stage, self._tp_rank, self._weights_check, self.weights.digest())}

    def _end(self, job: StoreJob, succeeded: bool) -> None:
        self._report.ended_stores[job.job_id] = self._report.ended_stores.get(job.job_id, 0) + 1
        if not succeeded:
            self._report.failed_stores.add(job.job_id)
