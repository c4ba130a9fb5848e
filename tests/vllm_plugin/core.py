"""What EngineCore does around the scheduler's side of the connector, for tests that ask it as vLLM does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvpool.protocol.errors import UnavailableError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun
from tests.support.processes import wait_for
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.vllm_objects import make_request, tokens
from vllm_plugin import session as session_module
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metadata import ConnectorMetadata, Handshake, StoreJob, WorkerMetadata
from vllm_plugin.model.identity import namespace_spec
from vllm_plugin.scheduler.scheduler import KVPoolScheduler

NUM_BLOCKS = 64

salts = itertools.count()


class Core:
    """What EngineCore does around the connector's scheduler side."""

    def __init__(self, config: Any, extra: dict[str, Any], cache: KVCacheConfig):
        self.side = KVPoolScheduler(config, cache, ConnectorConfig.parse(extra))
        self.sizes = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
        self.weights = b"1"  # Digest of what every rank has in memory.
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.side.bind_block_pool(self.pool)
        self.tables: dict[str, list[list[Any]]] = {}
        self.offers: dict[str, list[tuple[int, int, int]]] = {}

    def connected(self) -> Core:
        sessions = self.side.stages.sessions
        wait_for(lambda: sessions and all(session.namespace for session in sessions), "the sessions to be open")
        return self

    def ask(self, request: Request, computed: int = 0) -> int:
        """Asks once a step until there is an answer."""

        def answer() -> tuple[int] | None:
            matched, is_async = self.side.matched_tokens(request, computed)
            self.step()
            if matched is None:
                assert not is_async
                return None
            assert is_async == (matched > 0)
            return (matched,)

        return wait_for(answer, "an answer")[0]

    def allocate(
        self,
        request: Request,
        external_tokens: int,
        num_blocks: int | None = None,
        skipped: Sequence[int] = (),
    ) -> list[int]:
        """Gives a request blocks for all its tokens (or `num_blocks`) and says how much of the answer is taken.

        Args:
            skipped: of each group, how many blocks lie before its window.
        """
        tables = self.tables.setdefault(request.request_id, [[] for _ in self.sizes])
        for idx, (size, held) in enumerate(zip(self.sizes, tables, strict=True)):
            count = num_blocks if num_blocks is not None else -(-request.num_tokens // size)
            nulls = skipped[idx] if skipped and not held else 0
            held.extend([self.pool.null_block] * nulls)
            held.extend(self.pool.get_new_blocks(max(0, count - len(held))))
        self.side.after_alloc(request, KVCacheBlocks(tuple(tables)), external_tokens)
        return self.ids(request)

    def compute(self, request: Request) -> list[StoreJob]:
        """Gives a request blocks, none of them loaded, and computes its prompt in one step; returns its stores."""
        self.allocate(request, 0)
        return self.step((request, request.num_tokens)).stores

    def ids(self, request: Request, group: int = 0) -> list[int]:
        """A request's block table of one group."""
        return [block.block_id for block in self.tables[request.request_id][group]]

    def step(self, *scheduled: tuple[Request, int]) -> ConnectorMetadata:
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {request.request_id: count for request, count in scheduled}
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.kv_connector_block_state = KVConnectorBlockState(
            {*output.num_scheduled_tokens, *self.offers},
            lambda name: tuple([block.block_id for block in table] for table in self.tables[name]),
            self.offers,
        )
        metadata = self.side.build_metadata(output)
        if metadata.weights_check:
            self.tell_weights(metadata.weights_check)
        self.offers = {}
        for request, count in scheduled:
            request.num_computed_tokens += count
        return metadata

    def report(self, *jobs: int, failed: bool = False, **loads: Any) -> None:
        stores = WorkerMetadata(dict.fromkeys(jobs, 1), set(jobs) if failed else set()) if jobs else None
        self.side.update(KVConnectorOutput(kv_connector_worker_meta=stores, **loads))

    def tell_weights(self, check: int) -> None:
        """Every rank reports its weights, and those that it had at the start."""
        geometry = self.side.geometry
        ranks = [(stage, rank) for stage in range(geometry.num_stages) for rank in range(geometry.tp_size)]
        told = frozenset((*rank, *each) for rank in ranks for each in ((0, b"1"), (check, self.weights)))
        self.side.update(KVConnectorOutput(kv_connector_worker_meta=WorkerMetadata(weights=told)))

    def counted(self) -> dict[str, Any]:
        """What was counted since the last call."""
        stats = self.side.stats()
        return {} if stats is None else stats.data

    def free(self, request: Request) -> None:
        """Preemption: the blocks go, and nobody tells the connector."""
        for table in self.tables.pop(request.request_id):
            self.pool.free_blocks(block for block in reversed(table) if not block.is_null)
        request.num_computed_tokens = 0

    def finish(self, request: Request) -> None:
        tables = self.tables.get(request.request_id, [[] for _ in self.sizes])
        self.side.request_finished(request, [[block.block_id for block in table] for table in tables])
        if request.request_id in self.tables:
            self.free(request)

    def num_used_blocks(self) -> int:
        return NUM_BLOCKS - 1 - self.pool.get_num_free_blocks()


MakeCore = Callable[..., Core]


def fill(core: Core, hashes: Sequence[bytes], group: int = 0, stage: int = 0) -> None:
    """Puts blocks into the pool."""
    client, namespace = core.side.stages.sessions[stage].client, core.side.stages.sessions[stage].namespace
    assert namespace is not None
    values = [bytes(namespace.spec.groups[group].slot_bytes)] * len(hashes)
    client.put_blocks(namespace, BlockRun(group, hashes), values)


def stored(core: Core, name: str = "r") -> Request:
    """A request whose six blocks are all in the pool."""
    request = make_request(name, tokens(100, name))
    for stage in range(len(core.side.stages.sessions)):
        fill(core, request.block_hashes, stage=stage)
    return request


def lose_pool(core: Core) -> None:
    """The pool is away, for the rest of the test."""
    with patch.object(session_module, "FIRST_WAIT_S", 600.0):
        for session in core.side.stages.sessions:
            session.report(UnavailableError("the test took the pool away"), "lookup")


def num_leases(core: Core) -> int:
    return core.side.stages.sessions[0].client.admin.stats().num_leases


def wait_for_leases(core: Core, count: int) -> None:
    wait_for(lambda: num_leases(core) == count, f"{count} leases on the server")


def blocks(count: int) -> int:
    return count * BLOCK_TOKENS


def shake_hands(core: Core, config: Any, cache: KVCacheConfig, extra: dict[str, Any]) -> list[NamespaceSpec]:
    """Tells the scheduler's side what both stages' workers would."""
    specs = [namespace_spec(config, cache, ConnectorConfig.parse(extra), stage) for stage in range(2)]
    core.side.stages.handshake({(stage, 0): Handshake(spec) for stage, spec in enumerate(specs)})
    return specs
