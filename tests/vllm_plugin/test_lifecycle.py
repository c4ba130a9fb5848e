"""Whole requests through vLLM's real scheduler and both sides of the connector, on the toy engine: it checks, before
each forward pass, every byte of KV that attention would read."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest
from vllm.v1.request import Request

from testbed.ports import free_endpoint
from tests.conftest import StartServer
from tests.support.effort import some
from tests.support.faults import flip_arena, stopped
from tests.support.processes import wait_for
from tests.support.toy.engine import ToyEngine
from tests.support.toy.fleet import Fleet, assert_nothing_is_left, stats_of
from tests.support.toy.model import answer
from tests.support.vllm_objects import tokens
from tests.support.workers import workers_stopped
from tests.vllm_plugin.bugs import step_until_loading
from vllm_plugin.model.identity import namespace_spec
from vllm_plugin.worker import worker

WAITS_S = 15.0
"""Far more than the deadlines of requests to a server that is stopped; without those they would wait for ever."""
MODES = pytest.mark.parametrize("steps_ahead", [0, 1], ids=["synchronous", "asynchronous"])


@MODES
def test_what_one_engine_computed_another_loads(steps_ahead: int, fleet: Fleet) -> None:
    prompts = [tokens(count, count) for count in (15, 16, 17, 64, 65, 100)]
    first, second = fleet.start(steps_ahead=steps_ahead), fleet.start(steps_ahead=steps_ahead)
    expected = [answer(prompt, 8) for prompt in prompts]
    assert first.generate(*prompts) == expected
    assert second.generate(*prompts) == expected
    assert [second.cached_tokens[f"prompt-{idx}"] for idx in range(6)] == [0, 0, 16, 48, 64, 96]
    assert second.counted("hit_tokens") == 16 + 48 + 64 + 96
    for engine in (first, second):
        assert_nothing_is_left(engine)


@MODES
def test_a_second_turn_hits_what_the_first_one_decoded(steps_ahead: int, fleet: Fleet) -> None:
    first, second = fleet.start(steps_ahead=steps_ahead), fleet.start(steps_ahead=steps_ahead)
    prompt = tokens(50)
    reply = first.generate(prompt, max_tokens=30)[0]
    turn = [*prompt, *reply, *tokens(5, "next")]
    assert second.generate(turn) == [answer(turn, 8)]
    # The last of the 80 tokens has no KV: four blocks, not five.
    assert second.cached_tokens["prompt-0"] == 64


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 4), (8, 1), (1, 8), (8, 2), (8, 8)])
def test_tensor_parallel_sizes_share_blocks(writers: int, readers: int, fleet: Fleet) -> None:
    # The toy model has 4 KV heads: eight ranks hold each of them twice.
    first, second = fleet.start(tp_size=writers), fleet.start(tp_size=readers)
    prompt = tokens(100)
    assert first.generate(prompt) == second.generate(prompt) == [answer(prompt, 8)]
    assert second.cached_tokens["prompt-0"] == 96
    assert first.counted("stored_blocks") == 6 * min(writers, 4)
    assert_nothing_is_left(first)
    assert_nothing_is_left(second)


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


def test_an_engine_without_a_prefix_cache_of_its_own_still_loads(fleet: Fleet) -> None:
    first = fleet.start(options={"enable_prefix_caching": False})
    prompt = tokens(100)
    for _ in range(2):
        assert first.generate(prompt) == [answer(prompt, 8)]
    assert first.counted("hit_tokens") == 96
    assert first.num_used_blocks() == 0


def test_a_long_prompt_is_stored_chunk_by_chunk(fleet: Fleet) -> None:
    first = fleet.start(options={"max_num_batched_tokens": 47, "max_num_seqs": 4})
    second = fleet.start()
    prompt = tokens(400)
    assert first.generate(prompt) == second.generate(prompt) == [answer(prompt, 8)]
    assert second.cached_tokens["prompt-0"] == 384


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


@pytest.mark.usefixtures("answered_at_once")
@MODES
@pytest.mark.parametrize("num_blocks", [20, 30])
def test_preempted_requests_answer_right_and_leak_nothing(num_blocks: int, steps_ahead: int, fleet: Fleet) -> None:
    shared = tokens(60, "shared")
    prompts = [shared[: 20 * (nth % 4)] + tokens(40, nth) for nth in range(16)]
    expected = [answer(prompt, 60) for prompt in prompts]
    preempted = []
    for _ in range(2):  # Cold, then with everything in the pool; how many loads overlap there, the machine decides.
        engine = fleet.start(num_blocks=num_blocks, steps_ahead=steps_ahead)
        assert engine.generate(*prompts, max_tokens=60) == expected
        preempted += engine.preempted
        assert_nothing_is_left(engine)
    assert preempted, "the test wants preemption"
    assert engine.counted("loaded_blocks") > 0


@pytest.mark.usefixtures("answered_at_once")
def test_what_vllm_withdraws_from_a_step_is_neither_read_nor_stored(fleet: Fleet) -> None:
    """By priority, vLLM preempts a request whose chunk it has just scheduled, and has named the blocks of the chunk."""
    options = {"scheduling_policy": "priority", "max_num_batched_tokens": 128, "long_prefill_token_threshold": 64}
    low, high = tokens(400, "low"), tokens(46, "high")
    fleet.start().generate(low[:330])
    engine = fleet.start("kv_producer", options=options, num_blocks=28)
    engine.add("low", low, priority=1)
    engine.step()
    engine.add("high", high)
    engine.run()
    assert engine.preempted == ["low"], "the test wants preemption"
    assert (engine.answers["low"], engine.answers["high"]) == (answer(low, 8), answer(high, 8))
    assert fleet.start().generate(low) == [answer(low, 8)]


@MODES
def test_several_loads_at_once_do_not_deadlock_a_small_cache(steps_ahead: int, fleet: Fleet) -> None:
    prompts = [tokens(200, nth) for nth in range(6)]  # 13 blocks each, and 20 in all.
    first = fleet.start(num_blocks=128)
    first.generate(*prompts)
    second = fleet.start(num_blocks=20, steps_ahead=steps_ahead)
    assert second.generate(*prompts) == [answer(prompt, 8) for prompt in prompts]
    assert second.counted("loaded_blocks") >= 6 * 12 - 20
    assert_nothing_is_left(second)


# Aborts


@pytest.mark.parametrize("loads", ["succeeds", "fails"])
def test_a_request_aborted_while_it_loads_is_reported_once_and_its_blocks_come_back(
    loads: str, fleet_on: Callable[[str], Fleet], pool_server: StartServer
) -> None:
    server = pool_server()
    fleet = fleet_on(server.endpoint)
    prompt = tokens(100)
    fleet.start().generate(prompt)
    engine = fleet.start()
    request = engine.add("r", prompt)
    step_until_loading(engine, request)
    if loads == "fails":
        server.kill()
    engine.abort("r")
    assert engine.num_used_blocks() == 6, "a thread may still be writing to them"
    engine.run()
    assert_nothing_is_left(engine)
    # The same request again, under the same name.
    engine.add("r", prompt)
    engine.run()
    assert engine.answers["r"] == answer(prompt, 8)
    assert engine.cached_tokens["r"] == (96 if loads == "succeeds" else 0)
    assert_nothing_is_left(engine)


def test_requests_aborted_at_every_moment_leave_nothing_behind(fleet: Fleet) -> None:
    prompts = [tokens(100, nth) for nth in range(3)]
    fleet.start().generate(*prompts[:2])
    engine = fleet.start()
    for steps in range(12):
        for idx, prompt in enumerate(prompts):
            engine.add(f"{steps}-{idx}", prompt, max_tokens=20)
        for _ in range(steps):
            engine.step()
        engine.abort(*(f"{steps}-{idx}" for idx in range(3)))
        engine.run()
        assert_nothing_is_left(engine)
    assert engine.generate(*prompts) == [answer(prompt, 8) for prompt in prompts]


# Failed loads


def test_corrupt_blocks_are_never_read_and_never_asked_for_twice(
    fleet_on: Callable[[str], Fleet], pool_server: StartServer
) -> None:
    server = pool_server("--memory", "4MiB")
    fleet = fleet_on(server.endpoint)
    prompts = [tokens(100, nth) for nth in range(2)]  # Fewer than what opens the breaker.
    fleet.start().generate(*prompts)
    flip_arena(server)
    engine = fleet.start()
    assert engine.generate(*prompts) == [answer(prompt, 8) for prompt in prompts]
    assert engine.counted("load_failures") == 2
    assert engine.counted("lookups") == 2, "a request whose load failed looked up again"
    assert_nothing_is_left(engine)
    stats = stats_of(server)
    assert stats.counters["corrupt_blocks"] == 12
    assert stats.num_entries == 12, "what was computed instead is in the pool"
    assert fleet.start().generate(*prompts) == [answer(prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_pool_that_dies_under_loads_costs_a_recomputation(
    tp_size: int, fleet_on: Callable[[str], Fleet], pool_server: StartServer
) -> None:
    server = pool_server()
    fleet = fleet_on(server.endpoint)
    prompts = [tokens(100, nth) for nth in range(4)]
    fleet.start().generate(*prompts)
    engine = fleet.start(tp_size=tp_size)
    requests = [engine.add(f"r{nth}", prompt) for nth, prompt in enumerate(prompts)]
    step_until_loading(engine, requests[0])
    server.kill()
    engine.run()
    assert [engine.answers[f"r{nth}"] for nth in range(4)] == [answer(prompt, 8) for prompt in prompts]
    assert_nothing_is_left(engine)


def test_where_load_failures_are_fatal_the_request_fails_and_nothing_else(
    fleet_on: Callable[[str], Fleet], pool_server: StartServer
) -> None:
    server = pool_server("--memory", "4MiB")
    fleet = fleet_on(server.endpoint)
    bad, good = tokens(100, "bad"), tokens(100, "good")
    fleet.start().generate(bad)
    flip_arena(server)
    engine = fleet.start()
    engine.scheduler.recompute_kv_load_failures = False
    engine.add("bad", bad)
    engine.add("good", good)
    engine.run()
    assert engine.answers["good"] == answer(good, 8)
    assert engine.answers["bad"] == []
    assert_nothing_is_left(engine)


def test_a_server_that_stops_answering_delays_requests_by_the_deadlines_alone(
    fleet_on: Callable[[str], Fleet], pool_server: StartServer
) -> None:
    server = pool_server()
    fleet = fleet_on(server.endpoint)
    prompts = [tokens(100, nth) for nth in range(8)]
    fleet.start().generate(*prompts)
    engine = fleet.start(extra={"lookup_timeout_ms": 200, "store_timeout_ms": 300, "load_timeout_ms": 300})
    with stopped(server):
        started = time.monotonic()
        assert engine.generate(*prompts) == [answer(prompt, 8) for prompt in prompts]
        assert time.monotonic() - started < WAITS_S
        assert_nothing_is_left(engine)
        started = time.monotonic()
        assert engine.generate(*prompts) == [answer(prompt, 8) for prompt in prompts]
        assert time.monotonic() - started < WAITS_S
    engine.wait_until_connected()
    engine.scheduler.reset_prefix_cache()
    assert engine.generate(*prompts) == [answer(prompt, 8) for prompt in prompts]


def _looked_up(fleet: Fleet, prompt: list[int], **extra: object) -> tuple[ToyEngine, Request]:
    """An engine whose request hits what another has stored: the lookup is answered, and nothing is loaded."""
    fleet.start().generate(prompt)
    engine = fleet.start(extra=extra)
    request = engine.add("r", prompt)
    wait_for(lambda: engine.connector.matched_tokens(request, 0)[0], "the lookup's answer")
    return engine, request


def test_a_server_stopped_between_lookup_and_load_costs_a_recomputation(
    fleet_on: Callable[[str], Fleet], pool_server: StartServer
) -> None:
    server, prompt = pool_server(), tokens(100)
    settings = {"lookup_timeout_ms": 3_000, "transport": "stream", "load_timeout_ms": 3_000}
    engine, request = _looked_up(fleet_on(server.endpoint), prompt, **settings)
    with stopped(server), workers_stopped(server):
        started = time.monotonic()
        step_until_loading(engine, request)
        engine.run()
        assert time.monotonic() - started < WAITS_S
    assert engine.answers["r"] == answer(prompt, 8)
    assert engine.counted("load_failures") == 1


def test_a_server_whose_data_workers_go_on_is_not_missed_by_a_load(
    fleet_on: Callable[[str], Fleet], pool_server: StartServer
) -> None:
    server, prompt = pool_server(), tokens(100)
    engine, request = _looked_up(fleet_on(server.endpoint), prompt, transport="tcp")
    with stopped(server):
        step_until_loading(engine, request)
        engine.run()
    assert engine.answers["r"] == answer(prompt, 8)
    assert (engine.counted("load_failures"), engine.counted("loaded_blocks")) == (0, 6)


def test_a_pool_smaller_than_the_prompts_makes_no_answer_wrong(
    fleet_on: Callable[[str], Fleet], pool_server: StartServer
) -> None:
    server = pool_server("--memory", "1MiB", "--grace-ms", "0")  # 128 blocks of 8 KiB.
    fleet = fleet_on(server.endpoint)
    prompts = [tokens(400, nth) for nth in range(12)]  # 25 blocks each.
    expected = [answer(prompt, 8) for prompt in prompts]
    for _ in range(3):
        engine = fleet.start(num_blocks=96)
        assert engine.generate(*prompts) == expected
        assert_nothing_is_left(engine)
    wait_for(lambda: stats_of(server).num_leases == 0, "leases to be released")
    assert stats_of(server).num_tickets == 0


# The pool comes and goes


def test_an_engine_outlives_its_pool_and_finds_the_next_one(
    fleet_on: Callable[[str], Fleet], pool_server: StartServer
) -> None:
    endpoint = free_endpoint()
    fleet = fleet_on(endpoint)
    engine = fleet.start(wait=False)
    prompts = [tokens(100, nth) for nth in range(4)]
    expected = [answer(prompt, 8) for prompt in prompts]

    def round_of_requests() -> int:
        assert engine.generate(*prompts) == expected
        assert_nothing_is_left(engine)
        hits, engine.cached_tokens = sum(engine.cached_tokens.values()), {}
        return hits

    assert round_of_requests() == 0
    server = pool_server("--listen", endpoint)
    engine.wait_until_connected()
    assert [round_of_requests() for _ in range(2)] == [0, 4 * 96]
    server.kill()
    assert round_of_requests() == 0
    pool_server("--listen", endpoint)
    engine.wait_until_connected()
    # The worker has been idle: it may learn of the restart from its first job, and what that round stores is lost then.
    assert round_of_requests() == 0
    engine.wait_until_connected()
    round_of_requests()
    assert round_of_requests() == 4 * 96


# Everything at once


@pytest.mark.vllm
@pytest.mark.parametrize("seed", some(2, range(5)))
def test_whatever_happens_answers_are_right_and_nothing_is_left(
    seed: int, fleet_on: Callable[[str], Fleet], pool_server: StartServer
) -> None:
    chance = random.Random(seed)
    endpoint = free_endpoint()
    flags = ("--listen", endpoint, "--memory", "1MiB", "--max-ttl-ms", "1000", "--grace-ms", "200")
    server = pool_server(*flags)
    impatient = {"lookup_timeout_ms": 100, "load_timeout_ms": 300, "store_timeout_ms": 300}
    impatient["transport"] = chance.choice(["shm", "stream"])  # type: ignore[assignment]
    engines = [
        fleet_on(endpoint).start(extra={**impatient, "salt": f"chaos {seed}"}, num_blocks=40, steps_ahead=ahead)
        for ahead in (0, 1)
    ]
    prefixes = [tokens(count, count) for count in (30, 70, 150)]
    wanted: dict[tuple[int, str], list[int]] = {}
    with ExitStack() as stack:
        for nth in range(400):
            idx = chance.randrange(2)
            engine = engines[idx]
            match chance.choices(["step", "add", "abort", "stop", "go", "kill", "flip"], [60, 25, 6, 2, 4, 1, 2])[0]:
                case "step":
                    for _ in range(chance.randrange(1, 20)):
                        engine.step()
                case "add":
                    prompt = [*chance.choice(prefixes), *tokens(chance.randrange(1, 60), chance.randrange(5))]
                    max_tokens = chance.choice([1, 8, 40])
                    engine.add(f"r{nth}", prompt, max_tokens)
                    wanted[idx, f"r{nth}"] = answer(prompt, max_tokens)
                case "abort" if wanted:
                    at, request_id = chance.choice(list(wanted))
                    del wanted[at, request_id]
                    engines[at].abort(request_id)
                case "stop":
                    stack.enter_context(stopped(server))
                case "go":
                    stack.close()
                case "kill":
                    stack.close()
                    server.kill()
                    server = pool_server(*flags)
                case "flip":
                    flip_arena(server)
    for idx, engine in enumerate(engines):
        engine.run()
        assert {key[1]: engine.answers[key[1]] for key in wanted if key[0] == idx} == {
            request_id: right for (at, request_id), right in wanted.items() if at == idx
        }
        assert_nothing_is_left(engine)
    wait_for(
        lambda: (stats := stats_of(server)).num_leases == stats.num_tickets == stats.num_quarantined == 0,
        "the server to hold nothing",
    )
