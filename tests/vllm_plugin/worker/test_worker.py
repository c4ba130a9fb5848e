"""The worker's side alone: what it tells, what it starts, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvpool.protocol.errors import UnavailableError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun
from testbed.ports import free_endpoint
from tests.support.processes import ServerProcess, wait_for
from tests.support.toy.fixtures import BLOCK_TOKENS, TINY, MakeConfig
from tests.support.values import block_hash
from tests.support.vllm_objects import cache_config, full_attention
from tests.vllm_plugin.bugs import submitted
from tests.vllm_plugin.kinds import kv_cache, mla
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metadata import ConnectorMetadata, GroupBlocks, StoreJob, WorkerMetadata
from vllm_plugin.worker import worker as worker_module
from vllm_plugin.worker.copy import CpuCopier
from vllm_plugin.worker.transfer import SendThread
from vllm_plugin.worker.worker import KVPoolWorker

MakeWorker = Callable[..., KVPoolWorker]
MIXED = kv_cache(full_attention(), mla(), num_blocks=8)


@pytest.fixture
def worker(vllm_config: MakeConfig, shared_server: ServerProcess) -> Iterator[MakeWorker]:
    """`worker(cache, tp_rank=1, tp_size=2, drafts=True, register=False)`; they are shut down afterwards."""
    with ExitStack() as stack:

        def make(
            cache: KVCacheConfig, tp_rank: int = 0, tp_size: int = 1, drafts: bool = False, register: bool = True
        ) -> KVPoolWorker:
            drafting = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2} if drafts else None
            config = vllm_config(shared_server.endpoint if register else free_endpoint(), speculative_config=drafting)
            config.parallel_config.tensor_parallel_size = tp_size
            settings = ConnectorConfig.parse(config.kv_transfer_config.kv_connector_extra_config)
            made = KVPoolWorker(config, cache, settings, tp_rank)
            stack.callback(made.shutdown)
            if register:
                made.register_kv_caches(tensors(cache))
                wait_for(lambda: made.session.namespace, "the session to be open")
            return made

        yield make


def tensors(cache: KVCacheConfig) -> dict[str, torch.Tensor]:
    """Of each layer, as vLLM lays it out: [B, H, N, C]."""
    made = {}
    for group in cache.kv_cache_groups:
        for name in group.layer_names:
            spec: Any = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            shape = (cache.num_blocks, spec.num_heads, BLOCK_TOKENS, spec.state_content_size_bytes // 4)
            made[name] = torch.zeros(shape)
    return made


def store_of(job_id: int, *group_indices: int) -> ConnectorMetadata:
    parts = [GroupBlocks(idx, [BlockRun(idx, [block_hash(object())])], [[3]]) for idx in group_indices]
    return ConnectorMetadata(stores=[StoreJob(job_id, parts)])


def ended(worker: KVPoolWorker) -> WorkerMetadata:
    """The first report of stores, without the namespace and the weights that come with a rank's first reports."""

    def report() -> WorkerMetadata | None:
        told = worker.worker_metadata()
        return WorkerMetadata(told.ended_stores, told.failed_stores) if told is not None and told.ended_stores else None

    return wait_for(report, "a report of stores")


def test_an_engine_starts_while_the_files_of_its_weights_are_read(
    worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    are_read, namespace_spec = threading.Event(), worker_module.namespace_spec

    def slow(*args: Any) -> NamespaceSpec:
        assert are_read.wait(30)
        return namespace_spec(*args)

    monkeypatch.setattr(worker_module, "namespace_spec", slow)
    made = worker(cache_config(), register=False)
    made.register_kv_caches(tensors(cache_config()))
    told = made.worker_metadata()
    assert told is not None and not told.namespaces
    step = threading.Thread(target=made.start_loads, args=(ConnectorMetadata(weights_epoch="new"),), daemon=True)
    step.start()
    step.join(5)
    assert not step.is_alive(), "a step of the engine, which has been reset meanwhile, waits for the files"
    made.start_stores(store_of(7, 0))
    assert ended(made) == WorkerMetadata({7: 1}, {7}), "a job fails, as it does while the pool is away"
    are_read.set()
    again = wait_for(made.worker_metadata, "the namespace to be reported")
    assert again.namespaces == {(0, made.spec.fingerprint())}
    assert made.worker_metadata() is None, "the namespace is reported once"
    made.start_loads(ConnectorMetadata(weights_epoch="new"))
    assert made.spec.weights_epoch == "new"


def test_an_idle_rank_lets_go_of_the_pools_memory_once_the_pool_is_away(
    worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopted: list[object] = []
    monkeypatch.setattr(CpuCopier, "adopt", lambda self, memory: adopted.append(memory))
    made = worker(cache_config())
    before = made.session.namespace
    assert before is not None
    memory = before.transport.memory
    wait_for(lambda: adopted and adopted[-1] is memory, "the memory to be adopted")
    adopted.clear()
    made.session.report(UnavailableError("gone"), "ping")
    wait_for(lambda: adopted and adopted[-1] is not None, "the memory of the next opening to be adopted")
    assert adopted[0] is None


def test_a_rank_that_cannot_name_its_namespace_agrees_with_no_scheduler(
    worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> NamespaceSpec:
        raise OSError("the disk is gone")

    monkeypatch.setattr(worker_module, "namespace_spec", fails)
    made = worker(cache_config(), register=False)
    told = wait_for(made.worker_metadata, "a report")
    assert told.namespaces == {(0, b"")}
    assert "cannot name its namespace: the disk is gone" in caplog.text
    assert made.session.namespace is None


def test_a_kv_cache_of_another_size_than_its_spec_is_refused(worker: MakeWorker) -> None:
    made = worker(cache_config(), register=False)
    half = full_attention(head_size=TINY.head_dim // 2)
    with pytest.raises(
        ValueError, match=r"a shard of a block of full_attention has \d+ bytes in the KV cache, and \d+"
    ):
        made.register_kv_caches(tensors(cache_config(half)))


def test_a_rank_stores_the_groups_that_are_its_own_to_write(worker: MakeWorker) -> None:
    cache = kv_cache(full_attention(2), mla(), num_blocks=8)
    made = worker(cache, tp_rank=1, tp_size=2)
    made.start_stores(store_of(7, 0, 1))
    assert ended(made) == WorkerMetadata({7: 1})
    stats = made.stats()
    assert stats is not None and stats.data["stored_blocks"] == 1, "the latent is another rank's to write"
    made.start_stores(store_of(8, 1))
    assert made.worker_metadata() == WorkerMetadata({8: 1}), "with nothing to write a rank reports at once"
    assert made.worker_metadata() is None


def test_beside_a_draft_model_stores_wait_for_the_next_step(worker: MakeWorker) -> None:
    made = worker(MIXED, drafts=True)
    made.worker_metadata()
    with submitted(SendThread) as jobs:
        made.start_stores(store_of(7, 0))
        made.start_stores(store_of(8, 1))
        assert not jobs and made.worker_metadata() is None
        made.start_loads(ConnectorMetadata())
        assert len(jobs) == 2
    reports = ended(made)
    while len(reports.ended_stores) < 2:
        reports = reports.aggregate(ended(made))
    assert reports == WorkerMetadata({7: 1, 8: 1})


def test_a_store_that_failed_is_named(worker: MakeWorker) -> None:
    made = worker(MIXED)
    metadata = store_of(7, 0)
    metadata.stores[0].groups[0] = replace(metadata.stores[0].groups[0], block_ids=[[10_000]])  # No such block.
    made.start_stores(metadata)
    assert ended(made) == WorkerMetadata({7: 1}, {7})
