"""The worker's side of the connector: takes the step's jobs, hands them to the threads, reports what has ended.

Called by the model runner's thread alone; nothing here waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from vllm_plugin.config import ConnectorConfig
from vllm_plugin.copy import make_copier
from vllm_plugin.groups import rank_shards
from vllm_plugin.identity import namespace_spec
from vllm_plugin.layout import canonical_view
from vllm_plugin.metadata import ConnectorMetadata, StoreJob, WorkerMetadata
from vllm_plugin.metrics import KVPoolStats, Recorder
from vllm_plugin.session import Session
from vllm_plugin.transfer import ReceiveThread, SendThread

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpool.worker")

STOP_TIMEOUT_S = 2.0


class KVPoolWorker:
    """One rank.

    Args:
        tp_rank: of this worker.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig, tp_rank: int):
        spec = namespace_spec(vllm_config, kv_cache_config, config)
        self._group = spec.groups[0]
        self._mine = rank_shards(self._group, tp_rank, vllm_config.parallel_config.tensor_parallel_size)
        self._num_blocks = kv_cache_config.num_blocks
        self._name = f"worker {tp_rank}"
        self._recorder = Recorder()
        self._session = Session(config.client_config(), spec, self._name)
        self._sender: SendThread | None = None
        self._receiver: ReceiveThread | None = None
        self._ended_stores: dict[int, int] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learns where the KV cache lies, and starts the threads."""
        shards = self._mine.shards
        views = canonical_view(kv_caches, self._group.layer_names, self._num_blocks, shards.count)
        region_bytes = sum(view[0].numel() for view in views)
        expected = shards.count * self._group.chunk_bytes
        if region_bytes != expected:
            raise ValueError(f"a block's shards have {region_bytes} bytes in the KV cache, and {expected} in the pool")
        copier = make_copier(views)
        threads = (self._session, copier, shards, self._recorder)
        self._sender = SendThread(f"kvpool-send-{self._name}", *threads)
        self._receiver = ReceiveThread(f"kvpool-receive-{self._name}", *threads)

    def start_loads(self, metadata: ConnectorMetadata) -> None:
        assert self._receiver is not None
        for job in metadata.loads:
            self._receiver.submit(job)

    def start_stores(self, metadata: ConnectorMetadata) -> None:
        """Called when the step's forward pass has been launched: what it writes is there once the device is done."""
        assert self._sender is not None
        for job in metadata.stores:
            if self._mine.writes:
                self._sender.submit(job)
            else:
                self._end(job)  # A replica: another rank writes the same bytes.

    def transfer_results(self) -> KVConnectorTransferResults:
        """Loads that have ended. A failed one is in both sets: the request is then computed from its start."""
        results = KVConnectorTransferResults()
        if self._receiver is not None:
            for job, succeeded in self._receiver.take_ended():
                results.finished_recving.add(job.request_id)
                if not succeeded:
                    results.failed_recving.add(job.request_id)
        return results

    def worker_metadata(self) -> WorkerMetadata | None:
        if self._sender is not None:
            for job, _ in self._sender.take_ended():
                self._end(job)
        ended, self._ended_stores = self._ended_stores, {}
        return WorkerMetadata(ended) if ended else None

    def stats(self) -> KVPoolStats | None:
        return self._recorder.take()

    def shutdown(self) -> None:
        """Ends connection and threads, without waiting for the pool. Idempotent."""
        threads = [thread for thread in (self._sender, self._receiver) if thread is not None]
        for thread in threads:
            thread.request_stop()
        self._session.close()  # Ends the calls that a thread may be waiting for.
        for thread in threads:
            thread.join(STOP_TIMEOUT_S)

    def _end(self, job: StoreJob) -> None:
        self._ended_stores[job.job_id] = self._ended_stores.get(job.job_id, 0) + 1
