"""What happens to requests: each scenario drives engines of one subject, and the rules judge the recordings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig

from tests.conformance.engine import HaltedError, RecordedEngine
from tests.conformance.recorder import Recording
from tests.conformance.rules import Violation, violations
from tests.conformance.subject import Subject
from tests.support.processes import wait_for
from tests.support.vllm_objects import tokens

SCENARIOS: dict[str, Callable[[Bench], None]] = {}
WARM_UP_DEADLINE_S = 10.0


@dataclass
class Bench:
    """Engines of one subject, and what was recorded of each."""

    subject: Subject
    make_config: Callable[..., VllmConfig]
    engines: list[RecordedEngine] = field(default_factory=list)

    def start(self, options: dict[str, Any] | None = None, **toy: Any) -> RecordedEngine:
        """An engine that reaches what it shares with others.

        Args:
            options: of `EngineArgs`.
            toy: of `ToyEngine`.
        """
        config = self.subject.configure(self.make_config(**(options or {})))
        limits = (self.subject.hook_limit_s, self.subject.drain_limit_s)
        if "num_blocks" in toy:  # Each group has blocks of its own.
            toy["num_blocks"] *= max(1, len(self.subject.specs))
        engine = RecordedEngine(config, *limits, specs=self.subject.specs, **toy)
        self.engines.append(engine)
        if self.subject.hits:
            nth = len(self.engines)
            wait_for(lambda: _hits(engine, nth), "a first hit", WARM_UP_DEADLINE_S)
        return engine

    @property
    def recordings(self) -> list[Recording]:
        return [engine.recording for engine in self.engines]


def run(name: str, subject: Subject, make_config: Callable[..., VllmConfig]) -> list[Violation]:
    """Runs a scenario until it ends or an engine halts; returns the violations."""
    bench = Bench(subject, make_config)
    try:
        SCENARIOS[name](bench)
    except HaltedError:
        pass  # It is in the recording.
    finally:
        for engine in bench.engines:
            engine.shutdown()
    return [violation for recording in bench.recordings for violation in violations(recording)]


def _hits(engine: RecordedEngine, nth: int) -> bool:
    """Whether the engine hits a prompt that it stored: its connector has reached its storage."""
    return any(engine.ask(tokens(40, f"first hit {nth}"), max_tokens=1))


def _scenario(body: Callable[[Bench], None]) -> Callable[[Bench], None]:
    SCENARIOS[body.__name__.replace("_", "-")] = body
    return body


@_scenario
def cold(bench: Bench) -> None:
    """Prompts of lengths around the size of a block, together; nothing is stored yet."""
    bench.start().ask(*(tokens(count, f"cold {count}") for count in (1, 15, 16, 17, 32, 33, 100)))


@_scenario
def warm(bench: Bench) -> None:
    """A second engine, and a next turn of the same conversation."""
    prompts = [tokens(count, f"warm {count}") for count in (16, 17, 32, 64, 65, 100)]
    first, second = bench.start(), bench.start()
    first.ask(*prompts, max_tokens=20)
    _expect_hits(bench, second, second.ask(*prompts, max_tokens=20))
    turns = [[*prompt, *second.answers[name], *tokens(9, "next")] for prompt, name in _asked(second, prompts)]
    second.ask(*turns)


@_scenario
def warm_ahead(bench: Bench) -> None:
    """Asynchronous scheduling: a step is scheduled before the one before it is known."""
    prompts = [tokens(count, f"ahead {count}") for count in (17, 64, 100)]
    for _ in range(2):
        bench.start(steps_ahead=1).ask(*prompts)


@_scenario
def warm_ranks(bench: Bench) -> None:
    """Two tensor-parallel ranks, each with its part of every block."""
    prompts = [tokens(count, f"ranks {count}") for count in (17, 64, 100)]
    for _ in range(2):
        engine = bench.start(tp_size=2)
        hits = engine.ask(*prompts)
    _expect_hits(bench, engine, hits)


@_scenario
def chunked_prefill(bench: Bench) -> None:
    """Prompts longer than a step's budget, cold and warm, beside one another."""
    prompts = [tokens(count, f"chunked {count}") for count in (200, 150)]
    for _ in range(2):
        engine = bench.start({"max_num_batched_tokens": 47, "max_num_seqs": 4})
        hits = engine.ask(*prompts)
    _expect_hits(bench, engine, hits)


@_scenario
def preemption(bench: Bench) -> None:
    """More requests than blocks: requests are preempted, of which the connector is not told, and resumed."""
    shared = tokens(48, "shared by preempted ones")
    prompts = [shared[: 16 * (nth % 4)] + tokens(36, f"preempted {nth}") for nth in range(10)]
    for _ in range(2):
        bench.start(num_blocks=20).ask(*prompts, max_tokens=50)


@_scenario
def preemption_ahead(bench: Bench) -> None:
    """The same with asynchronous scheduling."""
    prompts = [tokens(40, f"preempted ahead {nth}") for nth in range(8)]
    for _ in range(2):
        bench.start(num_blocks=20, steps_ahead=1).ask(*prompts, max_tokens=50)


@_scenario
def abort_at_each_stage(bench: Bench) -> None:
    """Before the first step, while it is looked up, loaded, computed in chunks, decoded; with and without a hit."""
    known = tokens(100, "aborted and known")
    bench.start().ask(known)
    engine = bench.start({"max_num_batched_tokens": 64, "max_num_seqs": 4})
    for stage in range(9):
        ids = (f"known {stage}", f"new {stage}")
        engine.add(ids[0], known, 20)
        engine.add(ids[1], tokens(100, ids[1]), 20)
        engine.steps(stage)
        engine.abort(*ids)
        engine.drain()
    engine.ask(known)


@_scenario
def readmission(bench: Bench) -> None:
    """A new request with the id of an aborted one and another prompt, while old transfers may be under way."""
    known, other = tokens(100, "readmitted"), tokens(90, "readmitted as another")
    bench.start().ask(known, other)
    engine = bench.start()
    for stage in range(6):
        for prompt in (known, other, tokens(70, f"readmitted {stage}")):
            engine.add("again", prompt, 6)
            engine.steps(stage)
            engine.abort("again")
            while "again" in engine.scheduler.requests:
                engine.step()
        engine.drain()
    engine.add("again", other)
    engine.drain()


@_scenario
def shared_blocks(bench: Bench) -> None:
    """Requests that share blocks which are being stored or loaded, some of which are aborted then."""
    shared = tokens(80, "shared")
    for nth in range(2):
        engine = bench.start(num_blocks=40)
        for idx in range(8):
            engine.add(f"{nth}-{idx}", shared + tokens(5 * idx + 1, f"tail {idx}"), 12)
            engine.steps(idx % 3)
            if idx % 3 == 2:
                engine.abort(f"{nth}-{idx - 1}")
        engine.drain()


@_scenario
def small_cache(bench: Bench) -> None:
    """Several loads at once, which together are larger than the cache."""
    prompts = [tokens(180, f"large {nth}") for nth in range(4)]
    bench.start(num_blocks=128).ask(*prompts)
    bench.start(num_blocks=20).ask(*prompts)


@_scenario
def reset_of_own_cache(bench: Bench) -> None:
    """`reset_prefix_cache` under running requests: all of them are preempted."""
    prompts = [tokens(60, f"reset {nth}") for nth in range(4)]
    bench.start().ask(*prompts)
    engine = bench.start()
    for idx, prompt in enumerate(prompts):
        engine.add(f"{idx}", prompt, 20)
    for _ in range(4):
        engine.steps(3)
        with suppress(RuntimeError):  # Held blocks make it fail; the requests are preempted all the same.
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.drain()


@_scenario
def reset_of_connector(bench: Bench) -> None:
    """`reset_cache`: if it says that it worked, nothing of other weights is found."""
    engine = bench.start()
    prompts = [tokens(60, f"reset all {nth}") for nth in range(3)]
    engine.ask(*prompts)
    done = engine.scheduler.reset_connector_cache()
    connector = engine.scheduler.connector
    if done and any(hasattr(each, "scheduler_side") for each in getattr(connector, "_connectors", [connector])):
        engine.weights += 1  # A connector that sees that the weights are the same may keep its blocks.
    hits = engine.ask(*prompts)
    if done and bench.engines[0].scheduler.connector.reset_cache():
        engine.recording.note("after-reset", hit_tokens=sum(hits))
    engine.ask(*prompts)


@_scenario
def failed_loads(bench: Bench) -> None:
    """Loads of stored blocks fail, and one of the requests is aborted meanwhile."""
    if bench.subject.spoil is None:
        return
    prompts = [tokens(count, f"spoilt {count}") for count in (40, 64, 100)]
    bench.start(tp_size=2).ask(*prompts)
    engine = bench.start(tp_size=2)
    engine.ask(*prompts)
    bench.subject.spoil()
    engine.ask(*prompts)
    engine.add("aborted", prompts[0])
    engine.steps(3)
    engine.abort("aborted")
    engine.drain()


@_scenario
def stalled_storage(bench: Bench) -> None:
    """The storage does not answer for a while, under stores and loads, preemption and aborts."""
    prompts = [tokens(60, f"stalled {nth}") for nth in range(8)]
    bench.start().ask(*prompts[:4])
    engine = bench.start(num_blocks=24)
    with bench.subject.stall():
        for idx, prompt in enumerate(prompts):
            engine.add(f"{idx}", prompt, 30)
        engine.steps(30)
        engine.abort("0", "5")
        engine.steps(10)
    engine.drain()


def _expect_hits(bench: Bench, engine: RecordedEngine, hits: list[int]) -> None:
    if bench.subject.hits:
        engine.recording.note("warm", hit_tokens=sum(hits))


def _asked(engine: RecordedEngine, prompts: list[list[int]]) -> list[tuple[list[int], str]]:
    names = [name for name in engine.answers if name.startswith("ask-")][-len(prompts) :]
    return list(zip(prompts, names, strict=True))
