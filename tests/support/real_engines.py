"""What tests do with engines of real vLLM, on CPUs and on GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from testbed.engine import Answer, Engine, Prompt
from testbed.fork_server import fork_server
from testbed.ports import is_listening
from tests.support.processes import wait_for

DRAIN_DEADLINE_S = 60.0
SMALL_PROCESSES = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""Engines share two cores: one OpenMP thread each, and no compilation of code that runs once."""


@contextmanager
def small_processes(folder: Path) -> Iterator[None]:
    """Engines are forked from one process that has imported vLLM, and are small."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL_PROCESSES.items():
            patch.setenv(name, value)
        with fork_server(folder):
            yield


def one_by_one(engine: Engine, prompts: Sequence[Sequence[int] | Prompt], max_tokens: int = 8) -> list[Answer]:
    """Alone in its batch, each prompt meets the same kernels whatever was cached."""
    return [engine.generate([each], max_tokens)[0] for each in prompts]


def drain(engine: Engine) -> None:
    """Waits until every store has ended and no block is pinned, and empties the engine's own prefix cache."""
    wait_for(engine.reset_prefix_cache, "the engine's blocks to be free", DRAIN_DEADLINE_S)


def wait_until_connected(engine: Engine, transfer: dict[str, Any] | None) -> None:
    """Waits until scheduler and a worker have found each pool that is there: the first prompt is stored then, too."""
    for endpoint in re.findall(r'"endpoint": "([^"]+)"', json.dumps(transfer)):
        if endpoint.startswith("unix:") or is_listening(int(endpoint.rpartition(":")[2])):
            line = re.compile(rf"(scheduler|worker)[^:\n]*: kvpool at {re.escape(endpoint)},")
            wait_for(
                lambda line=line: set(line.findall(engine.log())) == {"scheduler", "worker"},
                f"the engine to find {endpoint}",
                60,
            )
