"""One engine, and everything that can happen to its pool. It always answers right, in bounded time, and heals.

The tests share the engine and nothing else: each has a server of its own, on the endpoint the engine was told.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testbed.engine import BLOCK_TOKENS, Answer, Engine, kvpool_transfer_config
from testbed.ports import free_endpoint
from tests.conftest import StartServer
from tests.e2e.conftest import StartEngines, assert_same, hit_tokens, pool_stats, prompt, wait_until_nothing_is_held
from tests.support.effort import some
from tests.support.faults import flip_arena, stopped
from tests.support.processes import ServerProcess, wait_for
from tests.support.real_engines import drain

pytestmark = pytest.mark.vllm

TTL_MS = 3_000
LENGTHS = (100, 700, 33, 1500)
SLACK_S = 40.0
"""How much longer than a recomputation an answer may take: deadlines of the pool, and a busy machine."""


@pytest.fixture(scope="module")
def endpoint() -> str:
    return free_endpoint()


@pytest.fixture(scope="module")
def faulty(start_engines: StartEngines, endpoint: str) -> Engine:
    """An engine whose pool is not there when it starts."""
    timeouts = {"lookup_timeout_ms": 300, "load_timeout_ms": 1_500, "store_timeout_ms": 1_500}
    return start_engines(kvpool_transfer_config(endpoint, decline_slow_loads=False, **timeouts))[0]


@pytest.fixture
def server(pool_server: StartServer, endpoint: str, faulty: Engine) -> Iterator[ServerProcess]:
    """Found by the engine. Afterwards nothing may be held, in the engine or in the server."""
    started = start(pool_server, endpoint)
    wait_until_found(faulty, started)
    yield started
    drain(faulty)
    if Path(f"/proc/{started.pid}").exists():
        wait_until_nothing_is_held(started)


def start(pool_server: StartServer, endpoint: str, memory: str = "64MiB") -> ServerProcess:
    limits = ("--max-ttl-ms", f"{TTL_MS}", "--grace-ms", "500")
    return pool_server("--listen", endpoint, "--memory", memory, *limits)


def wait_until_found(engine: Engine, server: ServerProcess) -> None:
    """Asks small things until one of them is in the pool: nobody tells the engine that the pool is back."""

    def stored() -> int:
        engine.generate([prompt(40, f"is it there? {time.monotonic()}")], max_tokens=1)
        return pool_stats(server).num_entries

    wait_for(stored, "the engine to find the pool", 60)
    drain(engine)


def prompts_of(test: str) -> list[list[int]]:
    return [prompt(length, f"{test} {length}") for length in LENGTHS]


HITS = [hit_tokens(length) for length in LENGTHS]


def cached(answers: list[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in answers]


def wait_until_all_hit(engine: Engine, prompts: list[list[int]], expected: list[Answer]) -> None:
    """What was computed instead is in the pool, once both sides have found each other; every answer is right.

    On a busy machine a lookup may be late, and is a miss then; the next one need not be.
    """

    def all_hit() -> bool:
        answers = engine.generate(prompts)
        assert_same(answers, expected)
        drain(engine)
        return cached(answers) == HITS

    wait_for(all_hit, "every prompt to hit", 60)


@pytest.fixture(scope="module")
def recomputed_in_s(faulty: Engine) -> float:
    """How long the prompts of a test take without a pool."""
    faulty.generate(prompts_of("warm-up"))
    started = time.monotonic()
    faulty.generate(prompts_of("clock"))
    return time.monotonic() - started


def test_a_pool_that_is_not_there_changes_nothing(faulty: Engine, plain_engine: Engine) -> None:
    prompts = prompts_of("absent")
    answers = faulty.generate(prompts)
    assert cached(answers) == [0] * len(LENGTHS)
    assert_same(answers, plain_engine.generate(prompts))
    assert "kvpool is away" in faulty.log()
    drain(faulty)


def test_a_pool_that_comes_later_is_found(faulty: Engine, server: ServerProcess, plain_engine: Engine) -> None:
    prompts = prompts_of("later")
    expected = plain_engine.generate(prompts)
    assert_same(faulty.generate(prompts), expected)
    wait_until_all_hit(faulty, prompts, expected)


@pytest.mark.parametrize("after_s", some(1, [0.02, 0.0, 0.2]))
def test_a_pool_killed_in_the_middle_of_a_batch(
    after_s: float, faulty: Engine, server: ServerProcess, plain_engine: Engine, recomputed_in_s: float
) -> None:
    kept, new = prompts_of(f"killed {after_s}"), prompts_of(f"killed, new {after_s}")
    faulty.generate(kept)
    drain(faulty)
    started = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        batch = thread.submit(faulty.generate, kept + new)
        time.sleep(after_s)
        server.kill()
        answers = batch.result(timeout=120)
    assert time.monotonic() - started < 3 * recomputed_in_s + SLACK_S
    assert_same(answers, plain_engine.generate(kept + new))


def test_a_pool_that_restarts_empty(
    faulty: Engine, server: ServerProcess, endpoint: str, pool_server: StartServer, plain_engine: Engine
) -> None:
    prompts = prompts_of("restarted")
    expected = plain_engine.generate(prompts)
    faulty.generate(prompts)
    drain(faulty)
    server.kill()
    again = start(pool_server, endpoint)
    # Until each side has noticed, a lookup may miss, a load may fail and a store may be lost. Answers may not change.
    answers = faulty.generate(prompts)
    assert_same(answers, expected)
    assert cached(answers) == [0] * len(LENGTHS)
    wait_until_found(faulty, again)
    wait_until_all_hit(faulty, prompts, expected)
    wait_until_nothing_is_held(again)


def test_a_pool_that_stops_answering(
    faulty: Engine, server: ServerProcess, plain_engine: Engine, recomputed_in_s: float
) -> None:
    kept, new = prompts_of("stopped"), prompts_of("stopped, new")
    expected = plain_engine.generate(kept), plain_engine.generate(new)
    faulty.generate(kept)
    drain(faulty)
    with stopped(server):
        for prompts, right in zip((kept, new), expected, strict=True):
            started = time.monotonic()
            answers = faulty.generate(prompts)
            assert time.monotonic() - started < recomputed_in_s + SLACK_S
            assert_same(answers, right)
        drain(faulty)
    wait_until_found(faulty, server)
    wait_until_all_hit(faulty, kept, expected[0])


def test_a_pool_stopped_in_the_middle_of_a_batch(
    faulty: Engine, server: ServerProcess, plain_engine: Engine, recomputed_in_s: float
) -> None:
    kept, new = prompts_of("stopped in a batch"), prompts_of("stopped in a batch, new")
    faulty.generate(kept)
    drain(faulty)
    started = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        batch = thread.submit(faulty.generate, kept + new)
        time.sleep(0.03)
        with stopped(server):
            answers = batch.result(timeout=120)
    assert time.monotonic() - started < 3 * recomputed_in_s + SLACK_S
    assert_same(answers, plain_engine.generate(kept + new))


def test_a_pool_too_small_for_its_prompts(
    faulty: Engine, endpoint: str, pool_server: StartServer, plain_engine: Engine
) -> None:
    server = start(pool_server, endpoint, memory="2MiB")  # 16 blocks of 128 KiB.
    wait_until_found(faulty, server)
    prompts = prompts_of("full")
    expected = plain_engine.generate(prompts)
    for _ in range(3):
        assert_same(faulty.generate(prompts), expected)
        drain(faulty)
    stats = pool_stats(server)
    assert stats.counters["out_of_space_puts"] > 0, "the test wants a full pool"
    assert stats.num_entries > 0
    wait_until_nothing_is_held(server)


def test_memory_that_changes_is_not_believed(faulty: Engine, server: ServerProcess, plain_engine: Engine) -> None:
    prompts = prompts_of("corrupt")
    expected = plain_engine.generate(prompts)
    wait_until_all_hit(faulty, prompts, expected)  # A put that took too long on a busy machine has been made again.
    flip_arena(server)
    wait_until_all_hit(faulty, prompts, expected)
    # However many loads the breaker or a late lookup put off: each block that an answer rests on was found out once.
    assert pool_stats(server).counters["corrupt_blocks"] == sum(HITS) // BLOCK_TOKENS
