"""Two hosts with a server each: an engine hits what the other host's engine has stored, and answers the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.engine import Engine, EngineSpec, kvpool_transfer_config
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
from tests.support.real_engines import drain, one_by_one

pytestmark = pytest.mark.vllm

WAITS = {**PATIENT, "promotion_wait_ms": 60_000}


def test_an_engine_loads_what_another_server_holds(
    pool_server: Callable[..., ServerProcess], model: Path, tmp_path: Path, plain_engine: Engine
) -> None:
    first = pool_server("--memory", "64MiB")
    second = pool_server("--memory", "64MiB", "--tier", f"peers:transport=tcp,peer={first.endpoint}")
    specs = [
        EngineSpec(model, kvpool_transfer_config(server.endpoint, **WAITS), FLOAT32, in_process=True)
        for server in (first, second)
    ]
    prompts = [prompt(length, f"peer {length}") for length in (100, 500, 1000)]
    expected = one_by_one(plain_engine, prompts)
    with running(tmp_path, *specs) as (here, there):
        assert_same(one_by_one(here, prompts), expected)
        drain(here)
        for each, right in zip(prompts, expected, strict=True):
            wait_for(lambda: hits(there, each, right, hit_tokens(len(each))), "the prompt to hit", 60)  # noqa: B023
        assert pool_stats(second).tiers[0].counters["promoted_blocks"] > 0
        first.kill()
        for each, right in zip(prompts, expected, strict=True):
            assert hits(there, each, right, hit_tokens(len(each))), "it is this server's now"
        wait_until_nothing_is_held(second)
