"""The main job in one command: a pool and two real vLLM engines on the CPU; the second loads what the first stored.

python -m benchmarks.demo        (or `make demo`, which also installs what it needs)
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness import measuring as harness
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from testbed import tiny_llama
from testbed.engine import BLOCK_TOKENS, Answer, Engine, EngineError, EngineSpec, kvpool_transfer_config

MEMORY = "1GiB"
# float32: rounding then never decides between two tokens, whatever the order in which a prompt is computed.
OPTIONS = {"dtype": "float32"}
console = Console(width=110)


def main(
    prompts: Annotated[int, typer.Option(help="How many prompts.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens in a prompt.", min=64, max=8000)] = 4096,
    logs: Annotated[Path | None, typer.Option(help="Where the engines' logs go; default: a new folder.")] = None,
) -> None:
    """Store prompts' KV with one engine, load it with another, and show both side by side."""
    logs = logs or Path(tempfile.mkdtemp(prefix="kvpool-demo-"))
    console.print(f"logs: {logs}")
    with _step("writing a small random-weight model"):
        model = tiny_llama.write(logs / "model")
    picks = random.Random(0)
    texts = [[picks.randrange(10, 4000) for _ in range(tokens)] for _ in range(prompts)]
    try:
        with ExitStack() as stack:
            with _step(f"starting kvpool-server ({MEMORY})"):
                endpoint = stack.enter_context(harness.kvpool_server(MEMORY))
            first = _answers("first engine: computes, stores", model, endpoint, texts, logs / "engine-1.log")
            second = _answers("second engine: loads", model, endpoint, texts, logs / "engine-2.log")
            with Client(ClientConfig(endpoint)) as client:
                stats = client.admin.stats()
    except EngineError as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(1) from None
    _show(first, second)
    held_mib = (stats.arena_bytes - stats.free_bytes) / 2**20
    console.print(f"the pool held {stats.num_entries} blocks, {held_mib:.0f} MiB; logs: {logs}")
    right = all(cold.tokens == warm.tokens for cold, warm in zip(first, second, strict=True))
    hit = all(warm.cached_tokens >= tokens - 2 * BLOCK_TOKENS for warm in second)
    if not (right and hit):
        console.print("[red]FAILED: the second engine missed blocks or answered differently[/red]")
        raise typer.Exit(1)


def _answers(what: str, model: Path, endpoint: str, texts: list[list[int]], log: Path) -> list[Answer]:
    spec = EngineSpec(model, kvpool_transfer_config(endpoint), OPTIONS)
    with _step(f"starting vLLM, {what}"):
        engine = Engine(spec, log)
    with engine:
        with _step("  warming it up (another prompt)"):
            engine.generate([[5] * len(texts[0])])
        answers = []
        for nth, text in enumerate(texts, 1):
            with _step(f"  prompt {nth} of {len(texts)}"):
                answers.extend(engine.generate([text]))
    return answers


def _show(first: list[Answer], second: list[Answer]) -> None:
    table = Table(title="The same prompts in two engines", title_justify="left")
    for heading in ("prompt", "cold TTFT", "warm TTFT", "faster", "tokens hit", "same output"):
        table.add_column(heading, justify="right")
    for nth, (cold, warm) in enumerate(zip(first, second, strict=True), 1):
        table.add_row(
            str(nth),
            f"{cold.ttft_s * 1e3:,.0f} ms",
            f"{warm.ttft_s * 1e3:,.0f} ms",
            f"{cold.ttft_s / warm.ttft_s:.1f} x",
            f"{warm.cached_tokens:,}",
            "yes" if cold.tokens == warm.tokens else "NO",
        )
    console.print(table)


@contextmanager
def _step(what: str) -> Iterator[None]:
    started = time.monotonic()
    print(f"{what} ...", end=" ", flush=True)
    yield
    print(f"{time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(typer.run(main))
