"""Connectors that break a rule of `statics`; those that break it by being imported are in modules of their own."""

from __future__ import annotations

import threading
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.conformance.reference import ReferenceConnector


class WantsTheCacheAtOnce(ReferenceConnector):
    def shutdown(self) -> None:
        self.kv[0].zero_()


class LeavesAThread(ReferenceConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.stop = threading.Event()
        if vllm_config.kv_transfer_config.kv_connector_extra_config.get("thread"):
            threading.Thread(target=self.stop.wait, args=(10,), name="left alone", daemon=True).start()


class DeliversPerhaps(ReferenceConnector):
    @property
    def requires_kv_delivery(self) -> bool:
        return None  # type: ignore[return-value]


class WantsItsOwnLayout(ReferenceConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "BLOCKS_FIRST"


class SwapsItsRole(ReferenceConnector):
    @property
    def role(self) -> KVConnectorRole:
        return KVConnectorRole.WORKER
