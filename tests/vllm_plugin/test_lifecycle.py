"""Whole requests through vLLM's real scheduler and both sides of the connector, on the toy engine: it checks, before
each forward pass, every byte of KV that attention would read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest

from tests.conftest import StartServer
from tests.support.faults import flip_arena
from tests.support.processes import ServerProcess, wait_for
from tests.support.toy.fleet import Fleet, assert_nothing_is_left, stats_of
from tests.support.toy.model import answer
from tests.support.toy.shapes import SHAPES
from tests.support.vllm_objects import tokens
from tests.vllm_plugin.bugs import MODES, at_once
from vllm_plugin.model.identity import namespace_spec
from vllm_plugin.scheduler import loads
from vllm_plugin.worker import transfer, worker
from vllm_plugin.worker.transfer import SendThread


@MODES
def test_a_rank_that_names_another_namespace_ends_the_sharing(
    steps_ahead: int, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it stores is not what the scheduler looks up: an engine that would never hit, and not say why."""
    first = fleet.start(steps_ahead=steps_ahead)
    first.generate(tokens(100))
    monkeypatch.setattr(
        worker, "namespace_spec", lambda *args: replace(namespace_spec(*args), weights_digest="of another directory")
    )
    second = fleet.start(steps_ahead=steps_ahead, tp_size=2)
    for _ in range(2):
        assert second.generate(tokens(100)) == [answer(tokens(100), 8)]
    assert second.generate(tokens(100, "new")) == [answer(tokens(100, "new"), 8)]
    assert any(
        record.levelname == "ERROR" and "a rank of pipeline stage 0 names namespace" in record.getMessage()
        for record in caplog.records
    )
    assert second.counted("namespaces_disagree") == 1
    assert second.counted("loaded_blocks") == 0
    assert_nothing_is_left(second)


def test_roles_are_kept(fleet: Fleet) -> None:
    producer, consumer, both = fleet.start("kv_producer"), fleet.start("kv_consumer"), fleet.start()
    kept, new = tokens(100, "kept"), tokens(100, "new")
    for _ in range(2):
        producer.generate(kept)
        producer.scheduler.reset_prefix_cache()
    assert producer.counted("stored_blocks") == 6 and producer.counted("lookups") == 0
    assert consumer.generate(kept, new) == [answer(kept, 8), answer(new, 8)]
    assert consumer.cached_tokens == {"prompt-0": 96, "prompt-1": 0}
    assert consumer.counted("stored_blocks") == consumer.counted("store_skipped_blocks") == 0
    both.generate(new)
    assert both.cached_tokens["prompt-0"] == 0


def test_an_engine_that_ends_gives_back_what_it_has_looked_up(fleet: Fleet, shared_server: ServerProcess) -> None:
    prompt = tokens(100)
    fleet.start().generate(prompt)
    engine = fleet.start()
    engine.scheduler.connector.on_new_request(engine.add("asks", prompt))
    wait_for(lambda: stats_of(shared_server).num_leases, "the lease of a request that waits")
    engine.shutdown()
    wait_for(lambda: not stats_of(shared_server).num_leases, "no lease", 2.0)


@pytest.mark.usefixtures("answered_at_once")
def test_what_vllm_withdraws_from_a_step_is_neither_read_nor_stored(fleet: Fleet) -> None:
    """By priority, vLLM preempts a request whose chunk it has just scheduled, and has named the blocks of the chunk."""
    options = {"scheduling_policy": "priority", "max_num_batched_tokens": 128, "long_prefill_token_threshold": 64}
    low, high = tokens(400, "low"), tokens(46, "high")
    fleet.start().generate(low[:330])
    engine = fleet.start("kv_producer", options=options, num_blocks=28)
    with at_once(SendThread):  # Free blocks alone are forgotten: none of low's is to be pinned.
        engine.add("low", low, priority=1)
        engine.step()
        engine.add("high", high)
        engine.step_until(lambda: engine.preempted, "low to be preempted")
        with patch.object(engine.connector, "matched_tokens", wraps=engine.connector.matched_tokens) as asked:
            engine.run()
    assert engine.preempted == ["low"], "the test wants preemption"
    assert asked.call_args.args[1] == 320, "the KV of chunks that were computed"
    assert (engine.answers["low"], engine.answers["high"]) == (answer(low, 8), answer(high, 8))
    assert fleet.start().generate(low) == [answer(low, 8)]


# Failed loads


@pytest.mark.parametrize("is_fatal", [False, True])
def test_corrupt_blocks_are_never_read_and_never_asked_for_twice(
    is_fatal: bool, fleet_on: Callable[[str], Fleet], pool_server: StartServer
) -> None:
    server = pool_server("--memory", "4MiB")
    fleet = fleet_on(server.endpoint)
    bad, good = [tokens(100, nth) for nth in range(2)], tokens(100, "good")  # Fewer than what opens the breaker.
    fleet.start().generate(*bad)
    flip_arena(server)
    engine = fleet.start()
    engine.scheduler.recompute_kv_load_failures = not is_fatal
    engine.generate(*bad, good)
    *answers, answer_to_good = engine.answers.values()
    assert answers == [[] if is_fatal else answer(prompt, 8) for prompt in bad]
    assert answer_to_good == answer(good, 8)
    assert engine.counted("load_failures") == 2
    assert engine.counted("lookups") == 3, "a request whose load failed looked up again"
    assert_nothing_is_left(engine)
    stats = stats_of(server)
    assert stats.counters["corrupt_blocks"] == 12
    assert stats.num_entries == (6 if is_fatal else 18), "what was computed instead is in the pool"
    assert fleet.start().generate(*bad) == [answer(prompt, 8) for prompt in bad]


# A load makes one call before its bytes move: the lookup, whose answer says where the blocks lie.

LOCATED = tokens(200)


def _counted_while_loading(fleet: Fleet, server: ServerProcess, shape: str, **options: int) -> dict[str, int]:
    """What the server counted while one engine loaded what another had stored."""
    writer, reader = (fleet.start(specs=SHAPES[shape], num_blocks=128, **options) for _ in range(2))
    writer.generate(LOCATED)
    before = stats_of(server).counters
    assert reader.generate(LOCATED) == [answer(LOCATED, 8)]
    assert reader.cached_tokens["prompt-0"] == 192
    after = stats_of(server).counters
    return {name: after[name] - before[name] for name in ("lookups", "located_blocks", "get_blocks")}


@pytest.mark.parametrize(
    ("shape", "ranks", "stages"), [("deepseek", 1, 1), ("gemma3", 2, 1), ("llama4", 1, 2), ("qwen3-next", 2, 2)]
)
def test_a_load_is_one_call_a_stage(
    fleet: Fleet, shared_server: ServerProcess, shape: str, ranks: int, stages: int
) -> None:
    counted = _counted_while_loading(fleet, shared_server, shape, tp_size=ranks, num_stages=stages)
    assert counted["lookups"] == stages and counted["located_blocks"] and not counted["get_blocks"]


@pytest.mark.parametrize(("schedulers", "ranks"), [("one host's", "another host's"), ("", "")])
def test_a_rank_asks_where_the_blocks_lie_unless_the_schedulers_host_is_its_own(
    fleet: Fleet, shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch, schedulers: str, ranks: str
) -> None:
    """A host that tells no boot id may be any."""
    monkeypatch.setattr(loads, "own_clock", lambda: schedulers)
    monkeypatch.setattr(transfer, "own_clock", lambda: ranks)
    assert _counted_while_loading(fleet, shared_server, "deepseek")["get_blocks"] == 12
