"""Two engines on two machines, as far apart as two regions: 10 ms each way. The pool is beside the first."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testbed.engine import Engine, EngineSpec, kvpool_transfer_config
from testbed.link import End, link, why_not
from tests.e2e.conftest import FLOAT32, PATIENT, assert_shared, prompt, running
from tests.support.processes import wait_for

pytestmark = pytest.mark.vllm

DELAY_MS = 10.0
PROMPTS = [prompt(length, f"far {length}") for length in (33, 500, 2_000)]


@contextmanager
def _pool(end: End) -> Iterator[str]:
    """A server at one end; its endpoint."""
    endpoint = f"{end.address}:50051"
    listen = ["--listen", endpoint, "--data-listen", f"{end.address}:50053", "--http-listen", "", "--insecure-network"]
    command = end.command(sys.executable, "-m", "kvpool_server", *listen, "--memory", "256MiB")
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield endpoint
    finally:
        running.terminate()
        running.wait(30)


def _is_connected(engine: Engine, endpoint: str) -> bool:
    return all(f"{side}: kvpool at {endpoint}," in engine.log() for side in ("scheduler", "worker 0"))


def test_an_engine_far_away_loads_what_was_stored_bit_for_bit(model: Path, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with link(DELAY_MS, loss=0.0) as (here, there), _pool(here) as endpoint:
        transfer = kvpool_transfer_config(endpoint, transport="tcp", insecure_network=True, **PATIENT)
        specs = [EngineSpec(model, transfer, FLOAT32, in_process=True, inside=end.command()) for end in (here, there)]
        with running(tmp_path, *specs) as (near, far):
            for engine in (near, far):
                wait_for(lambda engine=engine: _is_connected(engine, endpoint), "the engine to find the pool")
            assert_shared(near, far, PROMPTS)
