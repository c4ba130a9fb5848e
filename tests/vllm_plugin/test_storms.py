"""Storms: many requests, little room, aborts at every moment, over several shapes of model. Answers are right, and
neither the engine nor the pool keeps anything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.conftest import StartServer
from tests.support.faults import flip_arena, stopped
from tests.support.held import held_by
from tests.support.processes import ServerProcess, wait_for
from tests.support.toy.engine import ToyEngine
from tests.support.toy.fleet import Fleet, assert_nothing_is_left, stats_of
from tests.support.toy.model import answer
from tests.support.toy.shapes import SHAPES
from tests.support.vllm_objects import tokens
from tests.vllm_plugin.bugs import held, step_until_loading
from vllm_plugin.scheduler import stores
from vllm_plugin.worker.transfer import ReceiveThread, SendThread

ROOM = {"gemma3": 40, "qwen3-next": 40, "block sizes": 34, "deepseek": 20}
"""Shapes of model, and so many blocks that a few requests fill them."""
MODES: dict[str, dict[str, Any]] = {"synchronous": {"steps_ahead": 0}, "asynchronous": {"steps_ahead": 1, "late": True}}


def storms(count: int, shapes: Iterable[str]) -> list[Any]:
    """Each shape in each mode; `make test` takes `count` shapes, each in another mode than the one before."""
    names = list(shapes)
    often = list(zip(names[:count], itertools.cycle(MODES), strict=False))
    all_of_them = often + [each for each in itertools.product(names, MODES) if each not in often]
    return [
        pytest.param(shape, MODES[mode], id=f"{shape}-{mode}", marks=[pytest.mark.more] * (nth >= count))
        for nth, (shape, mode) in enumerate(all_of_them)
    ]


ALL = pytest.mark.parametrize(("shape", "mode"), storms(2, ROOM))
DRAFTS: dict[str, Any] = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
}


@pytest.fixture
def storm(
    fleet: Fleet, shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ToyEngine]]:
    """Starts engines of one namespace, `storm("gemma3", num_blocks=40)`; when a test is over, nothing may be left."""
    monkeypatch.setattr(stores, "DECODED_BLOCKS", 2)  # Requests are short.
    engines: list[ToyEngine] = []

    def start(shape: str, **toy: Any) -> ToyEngine:
        engines.append(fleet.start(specs=SHAPES[shape], **toy))
        return engines[-1]

    yield start
    for engine in engines:
        assert_nothing_is_left(engine)
    wait_for(lambda: not any(kept_by(shared_server).values()), f"the server to keep nothing: {kept_by(shared_server)}")


def kept_by(server: ServerProcess) -> dict[str, int]:
    stats = stats_of(server)
    return {
        "leases": stats.num_leases,
        "tickets": stats.num_tickets,
        "incomplete": stats.num_incomplete,
        "quarantined": stats.num_quarantined,
    }


def family(count: int, length: int = 70) -> list[list[int]]:
    """Prompts that share beginnings of several lengths."""
    shared = tokens(60, "shared")
    return [shared[: 20 * (nth % 4)] + tokens(length - 20 * (nth % 4), nth) for nth in range(count)]


@pytest.mark.usefixtures("answered_at_once")
@ALL
def test_preemption_storm(shape: str, mode: dict[str, Any], storm: Callable[..., ToyEngine]) -> None:
    prompts = family(10)
    expected = [answer(prompt, 50) for prompt in prompts]
    preempted = []
    for _ in range(2):  # Cold, then with everything in the pool; how many loads overlap there, the machine decides.
        engine = storm(shape, num_blocks=ROOM[shape], **mode, extra={"max_pinned_fraction": 1.0})
        assert engine.generate(*prompts, max_tokens=50) == expected
        preempted += engine.preempted
    assert preempted, "the storm wants preemption"
    assert engine.counted("loaded_blocks") > 0


@pytest.mark.usefixtures("keeps_stores", "answered_at_once")
@pytest.mark.parametrize(("shape", "mode"), storms(1, ["gemma3", "block sizes", "deepseek"]))
def test_drafts_are_rejected_in_a_preemption_storm(
    shape: str, mode: dict[str, Any], storm: Callable[..., ToyEngine]
) -> None:
    prompts = family(10)
    expected = [answer(prompt, 50) for prompt in prompts]
    preempted = []
    for _ in range(2):
        engine = storm(shape, num_blocks=ROOM[shape], **mode, options=DRAFTS, extra={"max_pinned_fraction": 1.0})
        assert engine.generate(*prompts, max_tokens=50) == expected
        assert engine.num_rejected_drafts, "the storm wants wrong drafts"
        preempted += engine.preempted
    assert preempted, "the storm wants preemption"
    # What was decoded is loaded, too, though drafts that were wrong have lain in its blocks.
    engine = storm(shape, num_blocks=128, options=DRAFTS)
    turns = [[*prompt, *told, *tokens(9, "next")] for prompt, told in zip(prompts, expected, strict=True)]
    assert engine.generate(*turns) == [answer(turn, 8) for turn in turns]
    assert all(engine.cached_tokens[f"prompt-{nth}"] > len(prompts[nth]) for nth in range(10))


STAGES = ("waiting", "looking up", "loading", "prefill", "decoding", "storing")


def bring_to(stage: str, engine: ToyEngine, request: Any) -> None:
    """Steps until a request is at a stage of its life."""
    match stage:
        case "looking up":
            engine.connector.matched_tokens(request, 0)
        case "loading":
            step_until_loading(engine, request)
        case "prefill":
            engine.step_until(lambda: 0 < request.num_computed_tokens < request.num_prompt_tokens, "a first chunk")
        case "decoding":
            engine.step_until(lambda: request.num_output_tokens >= 3, "three tokens")
        case "storing":
            engine.step_until(engine.connector.has_pinned_blocks, "a store")


@ALL
@pytest.mark.parametrize("stage", STAGES)
def test_abort_at_every_stage_and_the_same_name_again(
    stage: str, shape: str, mode: dict[str, Any], storm: Callable[..., ToyEngine]
) -> None:
    prompt = tokens(200)
    known = stage in ("looking up", "loading")
    if known:
        storm(shape, num_blocks=128).generate(prompt)
    engine = storm(shape, num_blocks=128, **mode, options={"max_num_batched_tokens": 64, "max_num_seqs": 8})
    with held(SendThread) as send, held(ReceiveThread) as receive:
        for _ in range(2):
            request = engine.add("r", prompt, max_tokens=20)
            # It goes on for long: on a busy machine many steps pass until the first request's lookup is answered.
            other = engine.add("other", [*prompt[:96], *tokens(30, "other")], max_tokens=380)
            bring_to(stage, engine, request)
            engine.abort("r")
            for _ in range(3):
                engine.step()
            engine.abort("other")
            receive.set()  # What is loading has its blocks until the load is over.
            for name in ("r", "other"):
                engine.step_until(lambda name=name: engine.may_reuse(name), f"{name} to end")  # type: ignore[misc]
            assert other.status == RequestStatus.FINISHED_ABORTED
            receive.clear()
        receive.set()
        engine.add("r", prompt, max_tokens=20)  # While what was stored under its name is on its way.
        engine.step_until(lambda: len(engine.answers["r"]) > 2, "an answer")
        send.set()
        engine.run()
    assert engine.answers["r"] == answer(prompt, 20)


@ALL
@pytest.mark.parametrize("fault", ["killed", "corrupt", "stopped"])
def test_pool_that_fails_in_a_storm(
    fault: str,
    shape: str,
    mode: dict[str, Any],
    fleet_on: Callable[[str], Fleet],
    pool_server: StartServer,
) -> None:
    server = pool_server()
    fleet = fleet_on(server.endpoint)
    prompts = family(12, 90)
    fleet.start(specs=SHAPES[shape], num_blocks=128).generate(*prompts[:8])
    impatient = {"lookup_timeout_ms": 200, "load_timeout_ms": 300, "store_timeout_ms": 300}
    engine = fleet.start(specs=SHAPES[shape], num_blocks=2 * ROOM[shape], **mode, extra=impatient)
    for nth, prompt in enumerate(prompts):
        engine.add(f"r{nth}", prompt, max_tokens=20)
    with ExitStack() as stack:
        match fault:
            case "corrupt":
                flip_arena(server)
            case _:
                engine.step_until(lambda: held_by(engine.connector)["loads"], "a load")
                if fault == "killed":
                    server.kill()
                else:
                    stack.enter_context(stopped(server))
        engine.abort("r3")
        engine.run()
    assert all(engine.answers[f"r{nth}"] == answer(prompts[nth], 20) for nth in range(12) if nth != 3)
    assert_nothing_is_left(engine)
