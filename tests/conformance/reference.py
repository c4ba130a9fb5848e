"""A small connector that keeps every rule: a cache within the process, whose transfers take whole steps.

Transfers end a fixed number of steps after they were asked for, so every run is the same, and whatever the engine does
meanwhile happens under them. `tests.conformance.broken` breaks it, one rule at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

DELAY_STEPS = 2


@dataclass
class SharedStore:
    """What engines with the same store name share: each rank's blocks, and the hashes that all ranks have stored."""

    blocks: dict[tuple[bytes, int], torch.Tensor] = field(default_factory=dict)
    complete: set[bytes] = field(default_factory=set)
    loads_fail: bool = False


@dataclass
class Load:
    request_id: str
    hashes: list[bytes]
    block_ids: list[int]


@dataclass
class Store:
    job_id: int
    hashes: list[bytes]
    block_ids: list[int]


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Store job -> how many ranks have ended it."""

    ended: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        jobs = self.ended.keys() | other.ended.keys()
        return WorkerMetadata({job: self.ended.get(job, 0) + other.ended.get(job, 0) for job in jobs})


class ReferenceConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both sides; one group of KV cache."""

    stores_by_name: ClassVar[dict[str, SharedStore]] = {}

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.shared = self.stores_by_name.setdefault(extra.get("store", ""), SharedStore())
        self.block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.world_size = vllm_config.parallel_config.world_size
        # Scheduler
        self.pool: Any = None
        self.requests: dict[str, Any] = {}
        self.offers: dict[str, int] = {}
        self.failed: set[str] = set()
        self.stored: dict[str, int] = {}
        self.new_loads: list[Load] = []
        self.pinned: dict[int, tuple[Store, int]] = {}
        self.last_job_id = 0
        # Worker
        self.rank = 0
        self.kv: list[torch.Tensor] = []
        self.step = 0
        self.loading: list[tuple[int, Load]] = []
        self.storing: list[tuple[int, Store]] = []
        if role is KVConnectorRole.WORKER:
            from vllm.distributed import get_tensor_model_parallel_rank

            self.rank = get_tensor_model_parallel_rank()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id in self.failed:
            return 0, False
        first = num_computed_tokens // self.block_tokens
        end = first
        last = min(len(request.block_hashes), (request.num_tokens - 1) // self.block_tokens)
        while end < last and request.block_hashes[end] in self.shared.complete:
            end += 1
        self.offers[request.request_id] = first
        return (end - first) * self.block_tokens, end > first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.requests[request.request_id] = request
        if num_external_tokens:
            first = self.offers[request.request_id]
            end = first + num_external_tokens // self.block_tokens
            block_ids = blocks.get_block_ids()[0][first:end]
            self.new_loads.append(Load(request.request_id, list(request.block_hashes[first:end]), block_ids))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self.new_loads = self.new_loads, []
        stores = []
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            first = self.stored.get(request_id, 0)
            end = min((request.num_computed_tokens + count) // self.block_tokens, len(request.block_hashes))
            table = scheduler_output.kv_connector_block_state.get_block_ids(request_id)[0][first:end]
            if table:
                self.last_job_id += 1
                self.stored[request_id] = first + len(table)
                hashes = list(request.block_hashes[first : first + len(table)])
                stores.append(Store(self.last_job_id, hashes, list(table)))
                self.pin(stores[-1])
        return Metadata(loads, stores)

    def pin(self, job: Store) -> None:
        self.pool.touch([self.pool.blocks[block_id] for block_id in job.block_ids])
        self.pinned[job.job_id] = (job, self.world_size)

    def unpin(self, job_id: int, ranks: int) -> None:
        job, remaining = self.pinned.pop(job_id)
        if remaining > ranks:
            self.pinned[job_id] = (job, remaining - ranks)
            return
        self.shared.complete.update(job.hashes)
        self.pool.free_blocks(self.pool.blocks[block_id] for block_id in reversed(job.block_ids))

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        for job_id, ranks in metadata.ended.items() if metadata else ():
            self.unpin(job_id, ranks)
        self.failed.update(connector_output.failed_recving)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        for ledger in (self.requests, self.offers, self.stored):
            ledger.pop(request.request_id, None)
        self.failed.discard(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        return bool(self.pinned)

    def reset_cache(self) -> bool | None:
        self.shared.complete.clear()
        self.stored.clear()
        return True

    def take_events(self) -> Iterable[Any]:
        return ()

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.kv = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.step += 1
        self.loading += [(self.step + DELAY_STEPS, job) for job in self.metadata().loads]

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        self.storing += [(self.step + DELAY_STEPS, job) for job in self.metadata().stores]

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        ended = [job for due, job in self.loading if due <= self.step]
        self.loading = [(due, job) for due, job in self.loading if due > self.step]
        for job in ended:
            results.finished_recving.add(job.request_id)
            if not self.load(job):
                results.failed_recving.add(job.request_id)
        return results

    def load(self, job: Load) -> bool:
        """Fetches a job's blocks; False if it failed."""
        if self.shared.loads_fail:
            return False
        for block_id, block_hash in zip(job.block_ids, job.hashes, strict=True):
            for layer, kv in enumerate(self.kv):
                kv[block_id] = self.shared.blocks[block_hash, self.rank][layer]
        return True

    def store(self, job: Store) -> None:
        for block_id, block_hash in zip(job.block_ids, job.hashes, strict=True):
            self.shared.blocks[block_hash, self.rank] = torch.stack([kv[block_id] for kv in self.kv])

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        ended = [job for due, job in self.storing if due <= self.step]
        self.storing = [(due, job) for due, job in self.storing if due > self.step]
        for job in ended:
            self.store(job)
        return WorkerMetadata({job.job_id: 1 for job in ended}) if ended else None

    def metadata(self) -> Metadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        return metadata
