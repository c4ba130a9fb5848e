"""A pool that outlives its processes, and outgrows its memory: engines hit, and answer the same."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from testbed.engine import BLOCK_TOKENS, Engine, EngineSpec, kvpool_transfer_config
from tests.e2e.conftest import (
    FLOAT32,
    PATIENT,
    assert_same,
    hit_tokens,
    hits,
    pool_stats,
    prompt,
    running,
    wait_until_nothing_is_held,
)
from tests.support.processes import ServerProcess, wait_for
from tests.support.real_engines import drain, one_by_one, wait_until_connected

pytestmark = pytest.mark.vllm

StartServer = Callable[..., ServerProcess]
WAITS = {**PATIENT, "promotion_wait_ms": 60_000}
LENGTHS = (100, 500, 1000)


class Fixture:
    """A pool that can be restarted in its place, and an engine that uses it."""

    def __init__(self, pool_server: StartServer, model: Path, tmp_path: Path):
        self._start = pool_server
        self._tier = ("--tier", f"file:{tmp_path / 'tier'},size=256MiB,name=one,create=yes")
        self.server = self._start("--memory", "8MiB", *self._tier)
        self.endpoint = self.server.endpoint
        self.spec = EngineSpec(model, kvpool_transfer_config(self.endpoint, **WAITS), FLOAT32, in_process=True)

    def restart(self) -> None:
        self.server.kill()
        self.server = self._start("--memory", "8MiB", *self._tier, "--listen", self.endpoint)

    def wait_until_written(self, num_blocks: int) -> None:
        wait_for(lambda: pool_stats(self.server).tiers[0].num_entries == num_blocks, "blocks to be in the tier", 60)


@pytest.fixture
def rig(pool_server: StartServer, model: Path, tmp_path: Path) -> Fixture:
    return Fixture(pool_server, model, tmp_path)


@pytest.fixture
def tiered(rig: Fixture, tmp_path: Path) -> Iterator[Engine]:
    with ExitStack() as stack:
        (engine,) = stack.enter_context(running(tmp_path, rig.spec))
        yield engine


def test_beyond_memory_and_over_a_restart(rig: Fixture, tiered: Engine, plain_engine: Engine) -> None:
    prompts = [prompt(length, f"tier {nth} {length}") for nth in range(3) for length in LENGTHS]
    expected = one_by_one(plain_engine, prompts)
    num_blocks = 0
    for each, right in zip(prompts, expected, strict=True):  # 18 MiB of blocks, through 8 MiB of memory.
        (answer,) = one_by_one(tiered, [each])
        assert_same([answer], [right])
        assert answer.cached_tokens == 0
        drain(tiered)
        num_blocks += (len(each) + len(answer.tokens) - 1) // BLOCK_TOKENS
        rig.wait_until_written(num_blocks)
    full = [hit_tokens(len(each)) for each in prompts]
    for each, right, tokens in zip(prompts, expected, full, strict=True):
        wait_for(lambda: hits(tiered, each, right, tokens), f"{tokens} tokens to hit", 60)  # noqa: B023
    assert pool_stats(rig.server).tiers[0].counters["promoted_blocks"] > 0
    drain(tiered)
    rig.restart()
    wait_until_connected(tiered, rig.spec.transfer)
    assert pool_stats(rig.server).num_entries == 0

    for each, right, tokens in zip(prompts, expected, full, strict=True):
        wait_for(lambda: hits(tiered, each, right, tokens), f"{tokens} tokens to hit", 60)  # noqa: B023
    counters = pool_stats(rig.server).tiers[0].counters
    assert counters["promoted_blocks"] >= num_blocks - 9 and not counters.get("corrupt_blocks")
    wait_until_nothing_is_held(rig.server)


def test_a_request_waits_at_the_server_for_its_blocks(rig: Fixture, tiered: Engine, plain_engine: Engine) -> None:
    """One lookup waits until the tier has brought the blocks up, however many steps the engine makes meanwhile."""
    each = prompt(1000, "waits at the server")
    (right,) = one_by_one(plain_engine, [each])
    assert_same(one_by_one(tiered, [each]), [right])
    drain(tiered)
    rig.wait_until_written((len(each) + len(right.tokens) - 1) // BLOCK_TOKENS)
    rig.restart()
    found = re.compile(rf"(?:scheduler|worker)[^:\n]*: kvpool at {re.escape(rig.endpoint)},")
    wait_for(lambda: len(found.findall(tiered.log())) == 4, "the engine to find the pool again", 60)
    assert hits(tiered, each, right, hit_tokens(len(each)))
    page = urllib.request.urlopen(f"{rig.server.http_url}/metrics", timeout=10).read().decode()
    (waits,) = re.findall(r'kvpool_rpc_seconds_count{method="LookupWait",status="OK"} (\d+)', page)
    counted = tiered.metrics()
    assert int(waits) >= counted["vllm:kvpool_promotion_waits"] == 1
    assert not counted.get("vllm:kvpool_load_failures")
    wait_until_nothing_is_held(rig.server)
