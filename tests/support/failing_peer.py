"""Connectors beside kvpool, for tests: one whose loads fail, and one that has KV of other weights."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_plugin.releases import hash_block_tokens


@dataclass
class Garbage(KVConnectorMetadata):
    """Blocks to fill with garbage, by request.

    Args:
        blocks: request -> its blocks that are promised.
    """

    blocks: dict[str, list[int]] = field(default_factory=dict)


class FailingPeer(KVConnectorBase_V1, SupportsHMA):
    """Promises the first prompt that it is asked about, loads garbage, and says so.

    Its extra config: `tokens` promised, `mode` ("sync", "async", "async by request"), `good` blocks that arrive,
    and `believes`: that it says nothing of what has failed.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        config = self._kv_transfer_config
        self._tokens = config.get_from_extra_config("tokens", 96)
        self._mode = config.get_from_extra_config("mode", "sync")
        self._good = config.get_from_extra_config("good", 0)
        self._believes = config.get_from_extra_config("believes", False)
        self._block_tokens = vllm_config.cache_config.block_size
        self._promised: set[str] = set()
        self._new: dict[str, list[int]] = {}
        self._layers: dict[str, torch.Tensor] = {}
        self._invalid: set[int] = set()
        self._results = KVConnectorTransferResults()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.num_prompt_tokens <= self._tokens or self._promised - {request.request_id}:
            return 0, False
        if num_computed_tokens or request.num_preemptions or request.request_id in self._new:
            return 0, False
        return (0, False) if request.request_id in self._promised else (self._tokens, self._mode != "sync")

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._promised.add(request.request_id)
            (ids,) = blocks.get_block_ids()
            self._new[request.request_id] = _real(ids[: num_external_tokens // self._block_tokens])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        spoiled, self._new = Garbage(self._new), {}
        return spoiled

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Garbage)
        for request_id, ids in metadata.blocks.items():
            for layer in self._layers.values():
                layer[ids[self._good :]] = 1
            if self._mode == "async by request":
                self._results.failed_recving.add(request_id)
            elif not self._believes:
                self._invalid.update(ids[self._good :])
            if self._mode != "sync":
                self._results.finished_recving.add(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: `start_load_kv` has loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: this connector stores no KV."""

    def wait_for_save(self) -> None:
        """Does nothing: this connector stores no KV."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None


class StalePeer(FailingPeer):
    """Promises a part of about every other prompt, and loads garbage: KV of other weights, which it believes in.

    Its extra config: `mode`, "sync" or "async", and `loads`: tokens of requests, by name; it loads no others then.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self._loads: dict[str, int] = self._kv_transfer_config.get_from_extra_config("loads", {})
        self._sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self._block_tokens = hash_block_tokens(kv_cache_config) or self._block_tokens
        self._local: dict[str, int] = {}
        self._believes = True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._local[request.request_id] = num_computed_tokens
        most = (request.num_tokens - 1 - num_computed_tokens) // self._block_tokens
        chance = random.Random(f"{request.request_id} {request.num_tokens} {num_computed_tokens}")
        num_blocks = chance.choice((0, 0, 1, most))
        if self._loads:
            num_blocks = self._loads.get(request.request_id, 0) // self._block_tokens
        if not 0 < num_blocks <= most:
            return 0, False
        return num_blocks * self._block_tokens, self._mode != "sync"

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first = self._local[request.request_id]
            stop, rows = first + num_external_tokens, zip(blocks.get_block_ids(), self._sizes, strict=True)
            ids = [each for row, size in rows for each in row[first // size : -(-stop // size)]]
            self._new[request.request_id] = _real(ids)


def _real(ids: list[int]) -> list[int]:
    """Before a window there are no blocks."""
    return [each for each in ids if each]
