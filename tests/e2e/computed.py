"""Prompt tokens that a real engine computes, by cause."""

from __future__ import annotations

from collections.abc import Callable

from testbed.engine import Engine, Prompt
from tests.support.real_engines import drain

COMPUTED = "vllm:kvpool_computed_tokens"

Causes = dict[str, float]


def causes_of(engine: Engine, act: Callable[[], object]) -> Causes:
    """Tokens that the engine computes while `act` runs, by cause; vLLM has counted as many."""
    before = engine.metrics()
    act()
    after = engine.metrics()
    drain(engine)
    assert after[COMPUTED] == after["vllm:prompt_tokens_by_source:local_compute"], "since the engine's start"
    counted = {
        name.removeprefix(f"{COMPUTED}:"): value - before.get(name, 0)
        for name, value in after.items()
        if name.startswith(f"{COMPUTED}:")
    }
    return {cause: tokens for cause, tokens in counted.items() if tokens}


def ask(engine: Engine, tokens: list[int] | Prompt, **options: object) -> Causes:
    return causes_of(engine, lambda: engine.generate([tokens], max_tokens=1, **options))
