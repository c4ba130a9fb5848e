"""What happens to requests: each scenario drives engines of one subject, whose contracts have the violations."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.conformance.contract import Contract, Violation
from tests.conformance.engine import CheckedEngine, HaltedError
from tests.conformance.subject import Subject
from tests.support.processes import wait_for
from tests.support.toy.engine import as_rank, create_connector
from tests.support.vllm_objects import cache_config, tokens

WARM_UP_DEADLINE_S = 10.0
THREADS_END_WITHIN_S = 3.0
LAYOUTS = (None, "HND", "NHD", "LBHNC", "LBNHC")


@dataclass
class Bench:
    """Engines of one subject, and the contract of what is at rest."""

    subject: Subject
    make_config: Callable[..., VllmConfig]
    engines: list[CheckedEngine] = field(default_factory=list)
    at_rest: Contract = field(default_factory=Contract)

    def start(self, options: dict[str, Any] | None = None, **toy: Any) -> CheckedEngine:
        """An engine that has reached what it shares with others: it hits a prompt that it has stored.

        Args:
            options: of `EngineArgs`.
            toy: of `ToyEngine`.
        """
        subject = self.subject
        config = subject.configure(self.make_config(**(options or {})))
        if "num_blocks" in toy:  # Each group has blocks of its own.
            toy["num_blocks"] *= max(1, len(subject.specs))
        engine = CheckedEngine(config, subject.hook_limit_s, subject.drain_limit_s, specs=subject.specs, **toy)
        self.engines.append(engine)
        prompt = tokens(40, f"first hit {len(self.engines)}")
        wait_for(lambda: any(engine.ask(prompt, max_tokens=1)), "a first hit", WARM_UP_DEADLINE_S)
        return engine

    def expect_hits(self, engine: CheckedEngine, hits: list[int]) -> None:
        engine.contract.reached["warm"] += 1
        if not any(hits):
            engine.contract.broke("a-warm-run-hits", "no token was loaded")


def run(name: str, subject: Subject, make_config: Callable[..., VllmConfig]) -> tuple[list[Violation], Counter[str]]:
    """Runs a scenario until it ends or an engine halts; returns the violations, and what the scenario reached."""
    bench = Bench(subject, make_config)
    threads = set(threading.enumerate())
    try:
        SCENARIOS[name](bench)
    except HaltedError:
        pass  # The contract has it.
    finally:
        for engine in bench.engines:
            engine.shutdown()
    contracts = [bench.at_rest, *(engine.contract for engine in bench.engines)]
    if not bench.engines:
        _expect_to_end(set(threading.enumerate()) - threads, bench.at_rest)
    reached = sum((contract.reached for contract in contracts), Counter[str]())
    return [violation for contract in contracts for violation in contract.violations], reached


def _expect_to_end(threads: set[threading.Thread], contract: Contract) -> None:
    ends_at = time.monotonic() + THREADS_END_WITHIN_S
    for thread in threads:
        thread.join(max(0.0, ends_at - time.monotonic()))
        if thread.is_alive():
            contract.broke("shutdown-ends-threads", thread.name)


def at_rest(bench: Bench) -> None:
    """Both sides are made, and shut down, before there is a KV cache."""
    config, contract = bench.subject.configure(bench.make_config()), bench.at_rest
    layout = KVConnectorFactory.get_connector_class(config.kv_transfer_config).get_required_kvcache_layout(config)
    if layout not in LAYOUTS:
        contract.broke("required-layout-is-known", layout)
    for role in KVConnectorRole:
        try:
            with as_rank(0, 1):
                connector = create_connector(config, role, cache_config())
            connector.shutdown()
        except Exception as error:
            contract.broke("constructor-needs-no-kv-cache", f"{role.name}: {type(error).__name__}: {error}")
            continue
        if connector.role is not role:
            contract.broke("role-is-kept", f"{connector.role} instead of {role}")
        if type(connector.requires_kv_delivery) is not bool:
            contract.broke("requires-kv-delivery-is-a-bool", connector.requires_kv_delivery)


def cold(bench: Bench) -> None:
    """Prompts of lengths around the size of a block, together; nothing is stored yet."""
    bench.start().ask(*(tokens(count, f"cold {count}") for count in (1, 15, 16, 17, 32, 33, 100)))


def warm(bench: Bench, options: dict[str, Any] | None = None, **toy: Any) -> None:
    """A second engine, and a next turn of the same conversation; some prompts are longer than a step's budget."""
    prompts = [tokens(count, f"warm {count}") for count in (16, 17, 32, 64, 65, 150, 200)]
    first, second = (bench.start(options, num_blocks=128, **toy) for _ in range(2))
    first.ask(*prompts, max_tokens=20)
    bench.expect_hits(second, second.ask(*prompts, max_tokens=20))
    names = [name for name in second.answers if name.startswith("ask-")][-len(prompts) :]
    answered = zip(prompts, names, strict=True)
    second.ask(*([*prompt, *second.answers[name], *tokens(9, "next")] for prompt, name in answered))


def preemption(bench: Bench, **toy: Any) -> None:
    """More requests than blocks: requests are preempted, of which the connector is not told, and resumed."""
    shared = tokens(48, "shared by preempted ones")
    prompts = [shared[: 16 * (nth % 4)] + tokens(36, f"preempted {nth}") for nth in range(10)]
    for _ in range(2):
        bench.start(num_blocks=20, **toy).ask(*prompts, max_tokens=50)


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


def small_cache(bench: Bench) -> None:
    """Several loads at once, which together are larger than the cache."""
    prompts = [tokens(180, f"large {nth}") for nth in range(4)]
    bench.start(num_blocks=128).ask(*prompts)
    bench.start(num_blocks=20).ask(*prompts)


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
    if done and connector.reset_cache():
        engine.contract.reached["after a reset"] += 1
        if any(hits):
            engine.contract.broke("a-reset-forgets", f"{sum(hits)} tokens of before")
    engine.ask(*prompts)


def failed_loads(bench: Bench) -> None:
    """Loads of stored blocks fail, and one of the requests is aborted meanwhile."""
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


SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "at-rest": at_rest,
    "cold": cold,
    "warm": warm,
    "warm-ahead": partial(warm, steps_ahead=1),
    "warm-ranks": partial(warm, tp_size=2),
    "chunked-prefill": partial(warm, options={"max_num_batched_tokens": 47, "max_num_seqs": 4}),
    "preemption": preemption,
    "preemption-ahead": partial(preemption, steps_ahead=1),
    "abort-at-each-stage": abort_at_each_stage,
    "readmission": readmission,
    "shared-blocks": shared_blocks,
    "small-cache": small_cache,
    "reset-of-own-cache": reset_of_own_cache,
    "reset-of-connector": reset_of_connector,
    "failed-loads": failed_loads,
    "stalled-storage": stalled_storage,
}
REACHED: dict[str, tuple[str, ...]] = {
    "at-rest": (),
    "cold": (),
    "warm": ("load", "warm"),
    "warm-ahead": ("load", "warm"),
    "warm-ranks": ("load", "warm"),
    "chunked-prefill": ("load", "warm", "held"),
    "preemption": ("preempted", "load"),
    "preemption-ahead": ("preempted",),
    "abort-at-each-stage": ("aborted while loading", "aborted while not loading"),
    "readmission": ("aborted while loading",),
    "shared-blocks": ("aborted", "held"),
    "small-cache": ("load",),
    "reset-of-own-cache": ("preempted",),
    "reset-of-connector": ("after a reset",),
    "failed-loads": ("failed load", "aborted"),
    "stalled-storage": ("preempted", "aborted"),
}
"""What the reference connector must meet in a scenario: no rule could fail otherwise."""
