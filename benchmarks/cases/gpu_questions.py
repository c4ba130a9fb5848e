"""How long does a batch of questions about long documents take on two engines that cannot keep the documents?

3FS's scenario, scaled: 8 documents of 20,000 tokens, 20 questions of 128 tokens about each, in any order, 8 in flight,
64 tokens of answer. Pairs of engines take turns: with kvpool, with vLLM's in-process offloading, with Mooncake, which
is asked a quarter, and alone, which is asked a tenth.

Needs CUDA, 60 GiB of its memory, and 60 GiB of the host's.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases.gpu import (
    OPTIONS,
    POOL_GIB,
    empty_own_cache,
    offloading_engine,
    pooled_engine,
    prompt_of,
    write_model,
)
from benchmarks.harness import measuring as harness
from benchmarks.harness.measuring import Logs, Row
from benchmarks.peers import mooncake_store
from testbed.engine import Engine, EngineError, EngineSpec, start_all

NUM_DOCUMENTS, QUESTION_TOKENS, ANSWER_TOKENS, IN_FLIGHT = 8, 128, 64, 4


def main(
    logs: Logs,
    tokens: Annotated[int, typer.Option(help="Tokens in a document.")] = 20_000,
    questions: Annotated[int, typer.Option(help="Questions about each document.")] = 20,
) -> None:
    """Time a batch of questions about long documents. Told to end, it reports what it has."""
    model = write_model(logs)
    asked = _questions(tokens, questions)
    rows: list[Row] = []
    failed: dict[str, str] = {}

    def report() -> None:
        harness.report("gpu_questions", rows, tokens=tokens, questions=questions, **failed)

    def report_and_end(*_: object) -> None:
        if rows:
            report()  # Before the engines, which take their time to end.
        sys.exit("told to end before all was measured")

    signal.signal(signal.SIGTERM, report_and_end)
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(harness.kvpool_server(f"{POOL_GIB}GiB"))
        master = stack.enter_context(mooncake_store.master())
        specs = {
            "kvpool": pooled_engine(model, endpoint),
            "vLLM offloading": offloading_engine(model),
            # Half of the memory in each engine: they share it.
            "Mooncake": mooncake_store.engine(model, master, logs, POOL_GIB << 29, OPTIONS),
        }
        rows += _measure_pair("alone", EngineSpec(model, None, OPTIONS), asked[::10], logs)
        for name, spec in specs.items():
            try:
                rows += _measure_pair(name, spec, asked, logs)
            except EngineError as error:  # Whatever ends one pair, the others are reported.
                failed[f"not measured: {name}"] = str(error).partition("\n")[0]
    report()


def _measure_pair(name: str, spec: EngineSpec, asked: Sequence[Sequence[int]], logs: Path) -> list[Row]:
    with contextlib.ExitStack() as stack:
        engines = start_all(stack, {name: spec, f"second {name}": spec}, logs)
        rows = _measure(engines, name, asked)
    print(*rows, flush=True)
    return rows


def _questions(tokens: int, questions: int) -> list[list[int]]:
    """All questions about all documents, in any order."""
    asked = [
        prompt_of(tokens, f"document {document}") + prompt_of(QUESTION_TOKENS, f"question {document} {nth}")
        for document in range(NUM_DOCUMENTS)
        for nth in range(questions)
    ]
    random.Random(0).shuffle(asked)
    return asked


def _measure(engines: Mapping[str, Engine], name: str, asked: Sequence[Sequence[int]]) -> list[Row]:
    """How many questions a second the engines answer that share them."""
    for engine in engines.values():  # What comes with an engine's first prompt is not counted.
        engine.generate([prompt_of(2_000, "the first")], max_tokens=1)
        empty_own_cache(engine)
    started = time.perf_counter()
    with ThreadPoolExecutor(len(engines)) as threads:
        shares = [
            threads.submit(_ask, engine, asked[nth :: len(engines)]) for nth, engine in enumerate(engines.values())
        ]
    seconds = time.perf_counter() - started
    hits = sum(share.result() for share in shares) / sum(map(len, asked))
    label = f"{len(asked)} questions, {name}"
    return [Row(label, len(asked) / seconds, "questions/s"), Row(f"{label}: tokens not computed", hits, "ratio")]


def _ask(engine: Engine, prompts: Sequence[Sequence[int]]) -> int:
    """Returns how many tokens were not computed."""
    cached = 0
    for first in range(0, len(prompts), IN_FLIGHT):
        answers = engine.generate(prompts[first : first + IN_FLIGHT], max_tokens=ANSWER_TOKENS)
        cached += sum(answer.cached_tokens for answer in answers)
    return cached


if __name__ == "__main__":
    typer.run(main)
