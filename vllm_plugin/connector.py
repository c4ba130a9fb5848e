"""`KVPoolConnector`: the hooks that vLLM calls, each handed to the scheduler's or the worker's side.

No hook raises an Exception (`metrics.py`), except while the engine starts, where the constructor and
`register_kv_caches` refuse what cannot work. What vLLM gets instead of a failed hook's answer, and how the hook's work
is ended, is beside each hook: a load that vLLM waits for is always reported, as failed where it is in doubt, and blocks
in doubt are not shared.

Importing this module is cheap and has no side effects: vLLM imports it in every process, in most of them for the class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import vllm
from packaging.version import InvalidVersion, Version
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.logger import init_logger

from vllm_plugin.metadata import ConnectorMetadata
from vllm_plugin.metrics import Guard, KVPoolPromMetrics, KVPoolStats, hook
from vllm_plugin.releases import TESTED, check_contract

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_plugin.scheduler.scheduler import KVPoolScheduler
    from vllm_plugin.worker.worker import KVPoolWorker

logger = init_logger("vllm.kvpool.connector")


class KVPoolConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """vLLM's v1 KV connector to a kvpool-server. One object is either the scheduler's side or a worker's."""

    guard = Guard()  # Of processes that have no side.

    def __init__(self, vllm_config: VllmConfig, role: base.KVConnectorRole, kv_cache_config: KVCacheConfig):
        from vllm_plugin.config import ConnectorConfig

        check_contract()
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = ConnectorConfig.parse(transfer.kv_connector_extra_config)
        self._scheduler: KVPoolScheduler | None = None
        self._worker: KVPoolWorker | None = None
        if role is base.KVConnectorRole.SCHEDULER:
            from vllm_plugin.scheduler.scheduler import KVPoolScheduler

            warn_if_untested(vllm.__version__)
            _log_settings_that_cost_hits(vllm_config)
            self._scheduler = KVPoolScheduler(vllm_config, kv_cache_config, config)
        else:
            from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

            from vllm_plugin.worker.worker import KVPoolWorker

            self._worker = KVPoolWorker(
                vllm_config, kv_cache_config, config, get_tensor_model_parallel_rank(), get_pp_group().rank_in_group
            )
        self.guard = (self._scheduler or self.worker_side).guard

    @property
    def scheduler_side(self) -> KVPoolScheduler:
        assert self._scheduler is not None, "a scheduler hook was called on a worker's connector"
        return self._scheduler

    @property
    def worker_side(self) -> KVPoolWorker:
        assert self._worker is not None, "a worker hook was called on the scheduler's connector"
        return self._worker

    # Both sides

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # A lost store is a later miss, nothing else.

    @hook(lambda self: None)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return (self._scheduler or self.worker_side).stats()

    @classmethod
    @hook(lambda cls, data=None: None)
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KVPoolStats(data or {})

    @classmethod
    @hook(lambda cls, *args, **kwargs: None)
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVPoolPromMetrics | None:
        return KVPoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @hook(lambda self: None)
    def shutdown(self) -> None:
        (self._scheduler or self.worker_side).shutdown()

    # Scheduler side, in the order of a step

    def _computed(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """A request whose lookup has failed is computed."""
        self.scheduler_side.miss(request)
        return 0, False

    def _reset_fails(self) -> bool | None:
        """A reset that has failed leaves KV of old weights: nothing is shared any more."""
        self.scheduler_side.turn_off()
        return False

    @hook(lambda self, gpu_block_pool: self.scheduler_side.turn_off())
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler_side.bind_block_pool(gpu_block_pool)

    @hook(lambda self, metadata: self.scheduler_side.turn_off())
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], base.KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler_side.stages.handshake(metadata)

    @hook(lambda self, request: None)
    def on_new_request(self, request: Request) -> None:
        self.scheduler_side.arrived(request)

    @hook(_computed)
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler_side.matched_tokens(request, num_computed_tokens)

    @hook(
        lambda self, request, blocks, num_external_tokens: self.scheduler_side.fail_load(request, num_external_tokens)
    )
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler_side.after_alloc(request, blocks, num_external_tokens)

    @hook(lambda self, scheduler_output: self.scheduler_side.bare_metadata(scheduler_output))
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> base.KVConnectorMetadata:
        return self.scheduler_side.build_metadata(scheduler_output)

    @hook(lambda self, connector_output: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler_side.update(connector_output)

    # Blocks of a request that has ended may be freed in any case: stores have references of their own, and vLLM keeps
    # those of a load until the load is reported.
    @hook(lambda *_: (False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @hook(lambda *_: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler_side.request_finished(request, block_ids)
        return False, None

    @hook(lambda self: False)
    def has_pending_block_frees(self) -> bool:
        return self.scheduler_side.has_pending_block_frees()

    @hook(lambda self: False)
    def has_pending_push_work(self) -> bool:
        return self.scheduler_side.has_pinned_blocks()

    @hook(_reset_fails)
    def reset_cache(self) -> bool | None:
        return self.scheduler_side.reset()

    @hook(lambda _: ())
    def take_events(self) -> Iterable[Any]:
        return self.scheduler_side.take_events()

    # Worker side, in the order of a step

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register_kv_caches(kv_caches)

    @hook(lambda self: None)
    def get_handshake_metadata(self) -> base.KVConnectorHandshakeMetadata | None:
        return self.worker_side.handshake()

    @hook(lambda self, forward_context, **kwargs: None)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker_side.start_loads(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no forward pass begins before its blocks are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Whole blocks are stored after the forward pass."""

    @hook(lambda self: None)
    def wait_for_save(self) -> None:
        self.worker_side.start_stores(self._metadata())

    @hook(lambda self, finished_req_ids: base.KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        return self.worker_side.transfer_results()

    @hook(lambda self: None)
    def build_connector_worker_meta(self) -> base.KVConnectorWorkerMetadata | None:
        return self.worker_side.worker_metadata()

    def _metadata(self) -> ConnectorMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ConnectorMetadata)
        return metadata


def _log_settings_that_cost_hits(vllm_config: VllmConfig) -> None:
    """Logs settings of vLLM with which an engine runs and shares less than it could, or fails requests."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            "kvpool: kv_load_failure_policy is %r: a request whose load from the pool fails will fail; set "
            "kv_load_failure_policy to 'recompute', and the request will be computed instead",
            transfer.kv_load_failure_policy,
        )
    if not (transfer.is_kv_producer and transfer.is_kv_consumer):
        omitted = "loads nothing from" if transfer.is_kv_producer else "stores nothing in"
        logger.info("kvpool: kv_role is %r: this engine %s the pool", transfer.kv_role, omitted)
    if not vllm_config.cache_config.enable_prefix_caching:
        logger.warning(
            "kvpool: vLLM's prefix caching is off: each prompt is loaded from the pool, also one that this engine "
            "has just computed; leave out --no-enable-prefix-caching"
        )


def warn_if_untested(version: str) -> bool:
    """Warns of a vLLM release that kvpool is not tested with; returns whether it did."""
    first, last = TESTED
    try:
        is_tested = first <= Version(version).release[:2] <= last
    except InvalidVersion:
        is_tested = False
    if not is_tested:
        logger.warning(
            "kvpool is tested with vLLM %d.%d to %d.%d, and this is vLLM %s, whose connector interface may differ; see "
            "docs/reference/compatibility.md",
            *first,
            *last,
            version,
        )
    return not is_tested
