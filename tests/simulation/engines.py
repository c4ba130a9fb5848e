"""Toy engines whose connector runs under the deterministic runtime, and the promises that they check.

The engine is vLLM's real scheduler around a model whose KV is known (`tests.support.toy.engine`); the connector is the
real one, sessions and transfer threads included. What is checked, and when:

- each forward pass: every byte of KV that attention reads.
- each gather and scatter: the engine's block is referenced, so nobody else can have been given it.
- each block that becomes readable in the pool: its bytes are those of the prefix that its hash names.
- each hook: vLLM's contract with a connector (`tests.conformance.contract`): no hit for a request whose load failed,
  every rank reports each load once; besides, a hit is aligned and leaves a token to compute.
- the end: every request is answered, right, and neither engine nor pool holds anything.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.request import Request

from kvpool.client import client
from kvpool.protocol.namespace import GroupSpec
from kvpool_server.cache.entry import Entry, Observer
from kvpool_server.rpc import operators, sessions
from tests.conformance.checked import SCHEDULER, Checked
from tests.conformance.contract import Contract
from tests.conformance.ownership import Ownership
from tests.simulation.deterministic_runtime import DeterministicRuntime
from tests.simulation.network import SimClient, SimServer
from tests.support.held import held_by, num_queued
from tests.support.toy import shapes
from tests.support.toy.device import Device, DeviceCopier
from tests.support.toy.engine import Rank, ToyEngine
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.toy.model import Sequences, answer
from tests.support.vllm_objects import make_request
from vllm_plugin import session
from vllm_plugin.connector import KVPoolConnector
from vllm_plugin.metrics import Guard
from vllm_plugin.scheduler import (
    admission,
    load_policy,
    loads,
    lookups,
    provenance,
    scheduler,
    store_jobs,
    stores,
)
from vllm_plugin.session import Breaker
from vllm_plugin.worker import transfer, worker

FULL, WINDOW, CHUNK = (replace(spec, head_size=2, head_size_v=2) for spec in (shapes.FULL, shapes.WINDOW, shapes.CHUNK))
NARROW, WIDE = replace(WINDOW, sliding_window=17), replace(WINDOW, block_size=32)
STATE, LATENT = shapes.STATE, shapes.LATENT

SHAPES: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (FULL,),
    "window, full": (WINDOW, WINDOW, FULL),
    "windows": (WINDOW, NARROW),
    "chunk, full": (CHUNK, FULL),
    "state, full": (STATE, FULL),
    "states": (STATE,),
    "latent": (LATENT,),
    "block sizes": (FULL, WIDE),
}
EXTENT_BYTES = 8 << 10


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine's configuration, as far as schedules vary it. See `ConnectorConfig`, vLLM and `ToyEngine`."""

    tp_size: int = 1
    steps_ahead: int = 0
    late: bool = False
    num_drafts: int = 0
    num_blocks: int = 40
    max_batched_tokens: int = 512
    max_pinned_fraction: float = 0.5
    store_decoded: bool = True
    window_interval_tokens: int = 4096
    decline_slow_loads: bool = False
    promotion_wait_ms: int = 1_000


class Prefixes(Observer):
    """The prefix that each block hash names, and so its bytes; checks each block that becomes readable."""

    def __init__(self, runtime: DeterministicRuntime):
        self._runtime = runtime
        self._of: dict[tuple[int, bytes], tuple[Sequences, int]] = {}
        self._weights: dict[str, int] = {}
        self.new_weights = itertools.count(2)
        self._memory: Callable[[], Any] = lambda: None
        self._engines: list[SimEngine] = []

    def watch(self, memory: Callable[[], Any], engines: list[SimEngine]) -> None:
        self._memory, self._engines = memory, engines

    def learn(self, tokens: Sequence[int], weights: int) -> Sequence[bytes]:
        """Every block that a request over these tokens can name; returns their hashes."""
        names = make_request("learn", tokens).block_hashes
        if names and (weights, names[-1]) not in self._of:
            model = Sequences(tokens, weights)
            for nth, name in enumerate(names, 1):
                self._of.setdefault((weights, name), (model, nth * BLOCK_TOKENS))
        return names

    def note_weights(self, fingerprint: bytes, weights: int) -> None:
        """Notes with which weights the blocks of a namespace are computed; 1 by default."""
        self._weights[fingerprint.hex()] = weights

    def weights_of(self, fingerprint: bytes) -> int:
        """With which weights the blocks of a namespace are computed."""
        return self._weights.get(fingerprint.hex(), 1)

    def stored(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._check_stored(entry)

    def _check_stored(self, entry: Entry) -> None:
        namespace, _, model = entry.group.namespace.partition("@")
        if model == "kvpool simulation":
            return
        size = entry.group.spec.slot_bytes
        name = f"block {entry.block_hash.hex()[:8]} of group {entry.group.idx}"
        weights = self.weights_of(bytes.fromhex(namespace))
        if (weights, entry.block_hash) not in self._of:
            self._runtime.broken.append(f"{name} is of other weights")
            return
        held = self._memory()[entry.offset : entry.offset + size].tobytes()
        if held != self.expected(entry.group.idx, entry.group.spec, entry.block_hash, weights):
            self._runtime.broken.append(f"{name} became readable with other bytes")

    def expected(self, group_idx: int, spec: GroupSpec, name: bytes, weights: int) -> bytes:
        """A block's bytes in the pool's order: shard, layer, head, token, K and V."""
        model, stop = self._of[weights, name]
        hashes = model.hashes[stop - spec.block_tokens : stop]
        engine = next(each for each in self._engines if spec.num_kv_heads or len(each.ranks) == spec.num_shards)
        group = engine.connector.geometry.groups[group_idx]
        names = [(member, name) for member in group.members for name in engine.layer_names[member]]
        if spec.num_kv_heads == 0:
            parts = [rank.cache.expected(member, name, hashes[-1:]) for rank in engine.ranks for member, name in names]
        else:
            heads = [self._heads(engine, member, name, hashes) for member, name in names]
            per_shard = spec.num_kv_heads // spec.num_shards
            parts = [layer[at : at + per_shard] for at in range(0, spec.num_kv_heads, per_shard) for layer in heads]
        return b"".join(part.numpy().tobytes() for part in parts)

    @staticmethod
    def _heads(engine: SimEngine, member: int, name: str, hashes: Sequence[int]) -> torch.Tensor:
        """[heads of the model, tokens, columns]."""
        parts = [rank.cache.expected(member, name, hashes) for rank in engine.ranks]  # [tokens, heads, columns]
        if parts[0].shape[1] == 1:
            parts = parts[:1]
        return torch.cat(parts, dim=1).transpose(0, 1)


class SimDevice(Device):
    """A device for which threads wait under the deterministic runtime."""

    def __init__(self, late: bool, runtime: DeterministicRuntime):
        super().__init__(late)
        self._runtime = runtime

    def wait(self, mark: int) -> None:
        self._runtime.wait(lambda: self.has_reached(mark))


class WatchedCopier:
    """A copier that checks that the engine's blocks are referenced."""

    def __init__(self, engine: SimEngine, copier: Any):
        self._engine, self._copier = engine, copier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)

    def gather(self, mark: Any, group_idx: int, block_ids: Sequence[Sequence[int]], buffers: Any) -> None:
        self._check("stored", block_ids)
        self._copier.gather(mark, group_idx, block_ids, buffers)

    def scatter(self, mark: Any, group_idx: int, block_ids: Sequence[Sequence[int]], buffers: Any) -> None:
        self._check("loaded", block_ids)
        self._copier.scatter(mark, group_idx, block_ids, buffers)

    def _check(self, verb: str, block_ids: Sequence[Sequence[int]]) -> None:
        blocks = self._engine.scheduler.kv_cache_manager.block_pool.blocks
        for block_id in itertools.chain(*block_ids):
            if block_id == 0 or blocks[block_id].ref_cnt < 1:
                self._engine.broke(f"block {block_id} is {verb} while it is free")


class SimContract(Contract):
    """vLLM's contract with a connector; besides, hits load asynchronously, and end where blocks of each group end."""

    times_asked = 1  # The schedule decides when the connector is asked again.

    def __init__(self, group_block_tokens: Sequence[int], num_ranks: int, runtime: DeterministicRuntime):
        super().__init__(group_block_tokens, num_ranks)
        self._runtime = runtime
        self._alignment = math.lcm(*group_block_tokens)

    def broke(self, rule: str, detail: object) -> None:
        self._runtime.broken.append(f"{rule}: {detail}")

    def matched(self, request: Request, num_local: int, answers: Sequence[Any]) -> None:
        super().matched(request, num_local, answers)
        count, is_async = answers[-1]
        boundary = num_local + (count or 0)
        if count and (not is_async or boundary % self._alignment or boundary >= request.num_tokens):
            self.broke("match-is-well-formed", f"a hit of {request.request_id} ends at {boundary}")


class SimEngine(ToyEngine):
    """See the module.

    Args:
        between: called between what two ranks do in a step.

    Attributes:
        num_stale: how often requests were preempted whose outcome was under way.
    """

    def __init__(
        self,
        config: VllmConfig,
        setup: Setup,
        specs: Sequence[KVCacheSpec],
        runtime: DeterministicRuntime,
        prefixes: Prefixes,
        between: Callable[[], None],
    ):
        self.setup = setup
        self.layer_names: list[list[str]] = []
        self._runtime, self._prefixes, self._between = runtime, prefixes, between
        self.contract = SimContract([spec.block_size for spec in specs], setup.tp_size, runtime)  # type: ignore[attr-defined]
        super().__init__(
            _config(config, setup),
            num_blocks=setup.num_blocks,
            tp_size=setup.tp_size,
            steps_ahead=setup.steps_ahead,
            late=setup.late,
            wait=False,
            make=self._make,
            specs=specs,
        )
        self.prompts: dict[str, tuple[list[int], int, int]] = {}
        self.aborted: set[str] = set()
        self.num_stale = 0
        self.layer_names = [list(group.layer_names) for group in self.ranks[0].cache_config.kv_cache_groups]
        for rank in self.ranks:
            self._watch_copies(rank)

    def _make(self, config: VllmConfig, role: KVConnectorRole, cache: KVCacheConfig) -> KVConnectorBase_V1:
        rank = SCHEDULER if role is KVConnectorRole.SCHEDULER else get_tensor_model_parallel_rank()
        return Checked(KVPoolConnector(config, role, cache), Ownership(self.contract), rank, math.inf)

    def make_device(self, late: bool) -> Device:
        return SimDevice(late, self._runtime)

    def broke(self, promise: str) -> None:
        self._runtime.broken.append(promise)

    def submit(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """Adds a request, unless one of that name is still known."""
        if request_id in self.scheduler.requests:
            return
        self._expect(request_id, prompt, max_tokens)
        self.aborted.discard(request_id)
        self.contract.added(request_id)
        self.add(request_id, prompt, max_tokens)

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        super().abort(request_id)

    def reset(self) -> None:
        """Resets for new weights, which come if nothing computed with the old ones is in use."""
        has_reset = self.scheduler.reset_prefix_cache(reset_connector=True)
        live = [request for request in self.scheduler.requests.values() if not request.is_finished()]
        has_begun = any(request.num_output_tokens or request.num_computed_tokens for request in live)
        is_new = has_reset and not has_begun and not self.in_flight
        if is_new:
            self.weights = next(self._prefixes.new_weights)
        for request in live if is_new else ():
            prompt, max_tokens, _ = self.prompts[request.request_id]
            self.sequences[request.request_id] = Sequences(prompt, self.weights)
            self._expect(request.request_id, prompt, max_tokens)

    def forget(self) -> None:
        """The engine's own cache is emptied, if nothing is in use; the weights stay."""
        self.scheduler.reset_prefix_cache()

    def step(self) -> int:
        if self.connector._resets.is_checked:
            (spec,) = self.connector.stages.specs
            self._prefixes.note_weights(spec.fingerprint(), self.weights)
        num_live = sum(not request.is_finished() for request in self.scheduler.requests.values())
        if (queued := num_queued(self.connector.queue)) > num_live:
            self.broke(f"{queued} requests are queued, and {num_live} are alive")
        return super().step()

    def _expect(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self.prompts[request_id] = prompt, max_tokens, self.weights
        self._prefixes.learn([*prompt, *answer(*self.prompts[request_id])], self.weights)

    def preempt(self) -> None:
        """Takes the blocks of the request that came last, as the scheduler does where it has none left.

        What steps under way compute of it is delivered later.
        """
        running = self.scheduler.running
        if running:
            self.num_stale += running[-1].num_in_flight_tokens > 0
            self.scheduler._preempt_request(running.pop(), self._runtime.clock())
            self.scheduler.prev_step_scheduled_req_ids.clear()

    def send_back(self) -> None:
        """Preempts all that run and empties the engine's own cache. What steps under way compute of them is lost."""
        self.num_stale += any(request.num_in_flight_tokens for request in self.scheduler.running)
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError as error:  # Blocks are loaded or pinned: vLLM has preempted, and keeps its cache.
            if "Failed to reset KV cache" not in str(error):
                raise

    def check_answers(self) -> None:
        """Checks the answers of all requests, each of which has ended."""
        for request_id in self.prompts:
            self.check_answers_of(request_id)

    def check_answers_of(self, request_id: str) -> None:
        right, given = answer(*self.prompts[request_id]), self.answers[request_id]
        if request_id in self.aborted:
            right = right[: len(given)]
        assert given == right, f"{request_id} was answered wrong"

    def check_idle(self) -> None:
        """Asserts that connector and engine hold nothing."""
        kept = held_by(self.connector)
        assert not any(kept.values()), f"the connector keeps {kept}"
        assert self.num_used_blocks() == 0, f"{self.num_used_blocks()} blocks are in use"
        assert self.scheduler.reset_prefix_cache()
        self.contract.ended()

    def _watch_copies(self, rank: Rank) -> None:
        for thread in (rank.worker.sender, rank.worker.receiver):
            assert thread is not None
            if isinstance(thread._copier, DeviceCopier):
                thread._copier.inner = WatchedCopier(self, thread._copier.inner)
            else:
                thread._copier = WatchedCopier(self, thread._copier)  # type: ignore[assignment]

    def run_rank(self, rank: Rank, *step: Any) -> Any:
        self._between()
        return super().run_rank(rank, *step)


def _config(base: VllmConfig, setup: Setup) -> VllmConfig:
    """A copy of a configuration that one engine may change."""
    config = copy.copy(base)
    for part in ("cache_config", "parallel_config", "scheduler_config", "kv_transfer_config"):
        setattr(config, part, copy.copy(getattr(base, part)))
    config.scheduler_config.max_num_batched_tokens = setup.max_batched_tokens
    config.speculative_config = _speculative(setup.num_drafts) if setup.num_drafts else None
    config.kv_transfer_config.kv_connector_extra_config = {
        "max_pinned_fraction": setup.max_pinned_fraction,
        "store_decoded": setup.store_decoded,
        "window_interval_tokens": setup.window_interval_tokens,
        "decline_slow_loads": setup.decline_slow_loads,
        "promotion_wait_ms": setup.promotion_wait_ms,
    }
    return config


@functools.cache
def _speculative(num_drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts, prompt_lookup_max=2)


class _AtOnce:
    """A thread that has ended when it is started."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], **_: Any):
        self.start = functools.partial(target, *args)


def take_over(patch: pytest.MonkeyPatch, runtime: DeterministicRuntime, server: SimServer, is_loud: bool) -> None:
    """Puts what the connector has of threads, time and network under a schedule's control.

    Args:
        is_loud: an error that the connector did not foresee is a broken promise.
    """
    time, threading = runtime.time(), runtime.threading()
    for module in (
        admission,
        lookups,
        provenance,
        loads,
        store_jobs,
        stores,
        transfer,
        client,
    ):
        patch.setattr(module, "time", time)
    for module in (sessions, operators):
        patch.setattr(module, "log", logging.getLogger("vllm.simulation"))
    patch.setattr(session, "threading", threading)
    patch.setattr(worker, "threading", SimpleNamespace(Thread=_AtOnce))
    # Reports only read counters; tests/vllm_plugin/scheduler/test_telemetry.py plays their losses and repetitions.
    patch.setattr(scheduler, "Reporter", lambda *_: SimpleNamespace(close=lambda: None))
    patch.setattr(session, "Client", functools.partial(SimClient, server))
    patch.setattr(session, "Breaker", functools.partial(Breaker, runtime.clock))
    patch.setattr(loads, "LoadPolicy", functools.partial(load_policy.LoadPolicy, clock=runtime.clock))
    ids = itertools.count(1)
    patch.setattr(provenance, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{next(ids):032x}")))
    patch.setattr(transfer, "queue", runtime.queue())

    def broke(_: Guard, what: str, error: BaseException) -> None:
        if is_loud:
            runtime.broken.append("".join([f"{what}:\n", *traceback.format_exception(error)]))

    patch.setattr(Guard, "failed", broke)
    patch.setattr(transfer, "PUT_BYTES", 3 * 2048)
    patch.setattr(stores, "DECODED_BLOCKS", 2)  # Requests are short.
    coroutines: dict[int, Any] = {}

    def start(thread: transfer.TransferThread[Any]) -> None:
        coroutines[id(thread)] = runtime.spawn(thread.name, thread.run)

    def join(thread: transfer.TransferThread[Any], timeout: float) -> None:
        runtime.join(coroutines[id(thread)], timeout)

    patch.setattr(transfer.TransferThread, "start", start)
    patch.setattr(transfer.TransferThread, "join", join)
