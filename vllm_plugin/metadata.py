"""What the two sides of the connector tell each other, once a step. Plain, picklable values.

Jobs have ids of their own: a preempted or repeated request comes back under the same request id.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvpool.types import BlockRun


@dataclass(slots=True)
class LoadJob:
    """Bring leased blocks into the engine.

    Args:
        run: which blocks of the pool.
        block_ids: where in the engine's KV cache each goes.
    """

    request_id: str
    lease_id: int
    run: BlockRun
    block_ids: list[int]


@dataclass(slots=True)
class StoreJob:
    """Put blocks of the engine into the pool; they stay pinned until every rank has reported the job."""

    job_id: int
    run: BlockRun
    block_ids: list[int]


@dataclass
class ConnectorMetadata(KVConnectorMetadata):
    """Scheduler to workers."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: how many ranks have ended each store job."""

    ended_stores: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        ended = dict(self.ended_stores)
        for job_id, ranks in other.ended_stores.items():
            ended[job_id] = ended.get(job_id, 0) + ranks
        return WorkerMetadata(ended)
