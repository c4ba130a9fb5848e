"""Bugs that KV connectors are known for, 15 to 20: each scenario passes, and fails where the bug is put back in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput

from kvpool.namespace import NamespaceSpec
from testbed.engine import kvpool_transfer_config
from tests.support.processes import ServerProcess, wait_for
from tests.support.toy.engine import ToyEngine
from tests.support.toy.fixtures import MakeConfig
from tests.support.toy.fleet import Fleet, assert_nothing_is_left
from tests.support.toy.model import answer
from tests.support.toy.shapes import SHAPES
from tests.support.vllm_objects import tokens
from tests.vllm_plugin.bugs import (
    HANGS,
    WRONG_KV,
    assert_caught,
    at_once,
    held,
    replaced,
    submitted,
)
from vllm_plugin.connector import KVPoolConnector
from vllm_plugin.metadata import ConnectorMetadata, StoreJob
from vllm_plugin.model import identity
from vllm_plugin.model.weights import Weights
from vllm_plugin.scheduler import scheduler
from vllm_plugin.scheduler.scheduler import KVPoolScheduler
from vllm_plugin.scheduler.stores import Stores, Tracked
from vllm_plugin.worker import worker
from vllm_plugin.worker.transfer import ReceiveThread, SendThread
from vllm_plugin.worker.worker import KVPoolWorker

FreshFleet = Callable[[], Fleet]
MODES = pytest.mark.parametrize("steps_ahead", [0, 1], ids=["synchronous", "asynchronous"])


@pytest.mark.parametrize(
    ("field", "setting", "ours", "theirs"),
    [
        ("model_dtype", "model_config.dtype", "bfloat16", "float16"),
        ("kv_cache_dtype", "cache_config.cache_dtype", "auto", "fp8_e5m2"),
        ("revision", "commit", "aa", "bb"),
        ("page_format", "device_config.device_type", "cpu", "cuda"),
        ("hash_seed", "PYTHONHASHSEED", "0", "1"),
        ("weights_digest", "weights", "aa", "bb"),
    ],
)
def test_bug_15_key_lacks_what_the_bytes_depend_on(
    field: str,
    setting: str,
    ours: str,
    theirs: str,
    vllm_config: MakeConfig,
    toy_engine: Callable[..., ToyEngine],
    shared_server: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = tokens(100)
    rounds = iter(range(2))

    def scenario(deadline_s: float) -> None:
        salt = f"bug 15 {field} {next(rounds)}"
        for value in (ours, theirs):
            config = vllm_config(shared_server.endpoint, extra={"salt": salt, "decline_slow_loads": False})
            if setting in ("weights", "commit"):
                weights = Weights("model", "", value) if setting == "weights" else Weights("model", value, "")
                monkeypatch.setattr(identity, "describe_weights", lambda *_, weights=weights: weights)
            elif setting.isupper():
                monkeypatch.setenv(setting, value)
            else:
                part, name = setting.split(".")
                setattr(getattr(config, part), name, value)
            engine = toy_engine(config)
            engine.generate(prompt)
            assert engine.cached_tokens["prompt-0"] == 0, f"{setting} = {theirs} reads blocks of {ours}"

    @contextmanager
    def dropped() -> Iterator[None]:
        def without(*args: Any) -> NamespaceSpec:
            return replace(identity.namespace_spec(*args), **{field: "x"})  # type: ignore[arg-type]

        with patch.object(scheduler, "namespace_spec", without), patch.object(worker, "namespace_spec", without):
            yield

    assert_caught(scenario, dropped, f"reads blocks of {ours}")


class MultiToy(ToyEngine):
    """A toy engine with several connectors of ours under vLLM's `MultiConnector`."""

    @property
    def sides(self) -> list[KVPoolScheduler]:
        return [child._of_scheduler for child in self.scheduler.connector.sub_connectors]

    def wait_until_connected(self) -> None:
        sessions = [each for side in self.sides for each in side._sessions]
        sessions += [child._of_worker._session for rank in self.ranks for child in rank.connector.sub_connectors]
        wait_for(lambda: all(session.namespace for session in sessions), "connections to the pool")

    def count_stats(self, stats: dict[str, Any]) -> None:
        for each in stats.values():
            super().count_stats(each.get("data", each))


def test_bug_16_unchosen_connector_loads_anyway(vllm_config: MakeConfig, shared_server: ServerProcess) -> None:
    prompts = [tokens(100, nth) for nth in range(3)]
    rounds = iter(range(2))

    def start(salt: str) -> MultiToy:
        endpoint = shared_server.endpoint
        config = vllm_config(endpoint)
        patient = {"lookup_timeout_ms": 5_000, "decline_slow_loads": False, "max_pinned_fraction": 1.0}
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "connectors": [kvpool_transfer_config(endpoint, salt=salt + name, **patient) for name in "ab"]
            },
        )
        return MultiToy(config)

    def scenario(deadline_s: float) -> None:
        salt = f"bug 16 {next(rounds)}"
        engines = [start(salt) for _ in range(2)]
        try:
            expected = [answer(prompt, 8) for prompt in prompts]
            assert engines[0].generate(*prompts) == expected
            with submitted(ReceiveThread) as jobs, held(ReceiveThread) as go:
                for nth, prompt in enumerate(prompts):
                    engines[1].add(f"r{nth}", prompt)
                engines[1].step_until(lambda: len({job.request_id for job in jobs}) == 3, "three loads")
                assert len(jobs) == 3, f"{len(jobs)} loads of 3 requests"
                go.set()
                engines[1].run(deadline_s)
            assert [engines[1].answers[f"r{nth}"] for nth in range(3)] == expected
            assert set(engines[1].cached_tokens.values()) == {96}
            for engine in engines:
                kept = [each for side in engine.sides for each in side.held().values()]
                assert not any(kept) and engine.num_used_blocks() == 0, kept
        finally:
            for engine in engines:
                engine.shutdown()

    after_alloc = KVPoolScheduler.after_alloc

    def load_what_was_found(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        lookup = self._lookups._by_request.get(request.request_id)
        found = lookup.boundary - lookup.asked if lookup is not None else 0
        after_alloc(self, request, blocks, found)

    assert_caught(scenario, replaced(KVPoolScheduler, "after_alloc", load_what_was_found), "6 loads of 3 requests")


@pytest.mark.parametrize("cut", [16, 40])
def test_bug_17_core_takes_less_than_was_found(cut: int, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(100)
    matched = KVPoolConnector.get_num_new_matched_tokens

    def cut_short(self: KVPoolConnector, *args: Any) -> tuple[int | None, bool]:
        count, is_async = matched(self, *args)
        return (count - cut if count else count), is_async

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start().generate(prompt)
        engine = fleet.start()
        with patch.object(KVPoolConnector, "get_num_new_matched_tokens", cut_short):
            assert engine.generate(prompt) == [answer(prompt, 8)]
        assert engine.cached_tokens["prompt-0"] == 96 - cut
        assert engine.counted("loaded_blocks") == math.ceil((96 - cut) / 16)
        assert_nothing_is_left(engine)

    after_alloc = KVPoolScheduler.after_alloc

    def all_or_nothing(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        lookup = self._lookups._by_request.get(request.request_id)
        found = lookup.boundary - lookup.asked if lookup is not None else 0
        assert num_external_tokens in (0, found), f"{num_external_tokens} of {found} tokens are taken"
        after_alloc(self, request, blocks, num_external_tokens)

    assert_caught(scenario, replaced(KVPoolScheduler, "after_alloc", all_or_nothing), "tokens are taken")


@pytest.mark.parametrize(("shape", "tp_size"), [("deepseek", 2), ("gemma3", 8)])
def test_bug_18_rank_that_writes_nothing_never_acknowledges(shape: str, tp_size: int, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(100)

    def scenario(deadline_s: float) -> None:
        engine = fresh_fleet().start(specs=SHAPES[shape], tp_size=tp_size)
        engine.add("r", prompt)
        engine.run(deadline_s)
        assert_nothing_is_left(engine)

    submit = KVPoolWorker._submit

    def submit_what_is_written(self: Any, jobs: list[StoreJob]) -> None:
        submit(self, [job for job in jobs if any(self._mine[part.group_idx].writes for part in job.groups)])

    assert_caught(scenario, replaced(KVPoolWorker, "_submit", submit_what_is_written), HANGS)


@MODES
def test_bug_19_slot_of_the_last_sampled_token_is_stored(steps_ahead: int, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(50)
    turn = [*prompt, *answer(prompt, 30), *tokens(5, "next")]  # Five blocks; nobody computed the 80th token's KV.

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start(steps_ahead=steps_ahead).generate(prompt, max_tokens=30)
        second = fleet.start(steps_ahead=steps_ahead)
        assert second.generate(turn) == [answer(turn, 8)]
        assert second.cached_tokens["prompt-0"] == 64

    @contextmanager
    def stored_at_the_end() -> Iterator[None]:
        finished = KVPoolConnector.request_finished_all_groups

        def store_all_tokens(self: Any, request: Any, block_ids: Any) -> Any:
            self._of_scheduler._stores._tracked[request.request_id].written = request.num_tokens
            return finished(self, request, block_ids)

        with patch.object(KVPoolConnector, "request_finished_all_groups", store_all_tokens):
            yield

    assert_caught(scenario, stored_at_the_end, WRONG_KV)


def test_bug_19_block_is_stored_before_its_last_chunk_is_computed(fresh_fleet: FreshFleet) -> None:
    prompt = tokens(200)

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        first = fleet.start(options={"max_num_batched_tokens": 47, "max_num_seqs": 4})
        with at_once(SendThread):
            first.generate(prompt)
        second = fleet.start()
        assert second.generate(prompt) == [answer(prompt, 8)]
        assert second.cached_tokens["prompt-0"] == 192

    store_job = Stores._store_job

    def whole_prompt(self: Stores, tracked: Tracked, num_tokens: int, *rest: Any) -> Any:
        return store_job(self, tracked, num_tokens + 1_000, *rest)

    assert_caught(scenario, replaced(Stores, "_store_job", whole_prompt), WRONG_KV)


@MODES
@pytest.mark.usefixtures("keeps_stores")
def test_bug_20_blocks_of_a_resumed_request_are_appended(steps_ahead: int, fresh_fleet: FreshFleet) -> None:
    prompts = [tokens(40, nth) for nth in range(3)]
    turns = [[*prompt, *answer(prompt, 60), 3] for prompt in prompts]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        first = fleet.start(num_blocks=16, steps_ahead=steps_ahead, extra={"max_pinned_fraction": 1.0})
        preempted = first.preempted
        assert first.generate(*prompts, max_tokens=60) == [answer(prompt, 60) for prompt in prompts]
        assert preempted, "the scenario wants preemption"
        second = fleet.start(num_blocks=128)
        assert second.generate(*turns) == [answer(turn, 8) for turn in turns]
        assert set(second.cached_tokens.values()) == {96}

    @contextmanager
    def remembered() -> Iterator[None]:
        build = KVPoolScheduler.build_metadata
        tables: dict[str, list[int]] = {}

        def build_from_memory(self: KVPoolScheduler, output: SchedulerOutput) -> ConnectorMetadata:
            for new in output.scheduled_new_reqs:
                tables[new.req_id] = list(new.block_ids[0])
            cached = output.scheduled_cached_reqs
            for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
                tables[request_id] += new_ids[0] if new_ids else []
            output.kv_connector_block_state = KVConnectorBlockState(
                set(output.num_scheduled_tokens), lambda request_id: (tables[request_id],), {}
            )
            return build(self, output)

        with patch.object(KVPoolScheduler, "build_metadata", build_from_memory):
            yield

    assert_caught(scenario, remembered, WRONG_KV)
