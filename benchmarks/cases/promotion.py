"""What does a request wait for whose blocks lie in a file tier?

First: how late does an engine learn that the blocks are up? An engine can ask once a step. It asks again and again, or
asks once and the server answers when the blocks are up. The engine is a loop of steps that do nothing.

Then: how long does a client take to load a prompt once all of it is up, and how long if it loads what is up while the
next blocks come up? The second is what a load that begins before its blocks are up could gain at most.

Each prompt was evicted from the arena when it is asked for.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases.mooncake_tier import PROMPT_BLOCK_BYTES, PROMPT_BYTES, Loader, name_of, pages, put_prompts, spec
from benchmarks.harness.measuring import Row, alternate, at_most, kvpool_server, ms, report, time_ratio
from kvpool import BlockRun
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.rpc import Namespace

STEPS_MS = (2, 10, 25, 50)
TRANSPORTS = ("shm", "tcp")
WAIT_MS = 200
PROMPTS_IN_ARENA, PROMPTS = 3, 12
PAUSE_S = 0.1


def found_after(client: Client, namespace: Namespace, names: Sequence[bytes], step_ms: float, wait_ms: int) -> float:
    """Seconds until a step finds all blocks up.

    Args:
        wait_ms: how long the server may wait with an answer; 0: the engine asks again once the last answer said when.
    """
    runs = [BlockRun(0, names)]
    began_at = time.perf_counter()
    pending, lease_id, due_at = client.rpc.lookup_async(namespace, runs, locate=True), 0, 0.0
    while True:
        if pending is not None and (found := pending.result(0)) is not None:
            client.rpc.release_quietly(lease_id)
            pending, lease_id = None, found.lease_id
            if not found.retry_after_ms:
                break
            due_at = time.perf_counter() + (0 if wait_ms else found.retry_after_ms / 1e3)
        if pending is None and time.perf_counter() >= due_at:
            pending = client.rpc.lookup_async(namespace, runs, locate=True, wait_ms=wait_ms)
        time.sleep(step_ms / 1e3)
    taken = time.perf_counter() - began_at
    assert found.hits[0].num_leading == len(names), "a block was lost"
    client.release([lease_id])
    return taken


def measure(directory: Path, rounds: int) -> list[Row]:
    """Rows of both questions."""
    count = PROMPT_BYTES // PROMPT_BLOCK_BYTES
    prompts = [[name_of("promotion", nth, idx) for idx in range(count)] for nth in range(PROMPTS)]
    size = (PROMPTS + 4) * PROMPT_BYTES
    flags = ("--tier", f"file:{directory / 'tier'},size={size},name=one,create=yes", "--policy", "lru")
    measures: dict[tuple[str, object], Callable[[], float]] = {}
    with ExitStack() as stack:
        endpoint = stack.enter_context(kvpool_server(str(PROMPTS_IN_ARENA * PROMPT_BYTES), *flags))
        sink = pages(PROMPT_BYTES)
        put_prompts(endpoint, prompts, sink)
        following = itertools.cycle(prompts)  # When one comes again, others have taken its room in the arena.
        for transport in TRANSPORTS:
            config = ClientConfig(endpoint, transport=transport, timeout_ms=20_000, data_timeout_ms=20_000)
            client = stack.enter_context(Client(config))
            namespace = client.open_namespace(spec(PROMPT_BLOCK_BYTES))
            loader = Loader(client, namespace, sink)
            measures["as they come", transport] = functools.partial(_with_next, loader.as_they_come, following)
            measures["all", transport] = functools.partial(_with_next, loader.once_all_are_up, following)
        for step_ms in STEPS_MS:
            for name, wait_ms in (("asks", 0), ("waits", WAIT_MS)):
                find = functools.partial(found_after, client, namespace, step_ms=step_ms, wait_ms=wait_ms)
                measures[name, step_ms] = functools.partial(_with_next, find, following)
        taken = alternate(measures, rounds, what="promotion", warmups=1)
    rows = []
    for step_ms in STEPS_MS:
        asks, waits, what = taken["asks", step_ms], taken["waits", step_ms], f"steps of {step_ms} ms"
        rows.append(Row(f"{what}, until a step that asks again finds all up", ms(asks), "ms"))
        rows.append(Row(f"{what}, until a step finds the answer that all is up", ms(waits), "ms"))
        rows.append(at_most(f"{what}, answered over asking again", time_ratio(waits, asks), "x", 1.0))
    for transport in TRANSPORTS:
        come, whole, what = taken["as they come", transport], taken["all", transport], f"prompt over {transport}"
        rows.append(Row(f"{what}, loaded as blocks come up", ms(come), "ms"))
        rows.append(Row(f"{what}, loaded once all are up", ms(whole), "ms"))
        rows.append(Row(f"{what}, as they come over once all are up", time_ratio(come, whole), "x"))
    return rows


def _with_next(action: Callable[[Sequence[bytes]], float], following: Iterator[Sequence[bytes]]) -> float:
    time.sleep(PAUSE_S)
    return action(next(following))


def main(
    directory: Annotated[Path | None, typer.Option(help="On the disk of the tier; a temporary one by default.")] = None,
    rounds: Annotated[int, typer.Option(help="Of each measure.")] = 9,
) -> None:
    """Measures, and reports."""
    with tempfile.TemporaryDirectory(prefix="kvpool-promotion-", dir=directory) as made:
        rows = measure(Path(made), rounds)
    report("promotion", rows, rounds=rounds, prompt_bytes=PROMPT_BYTES, block_bytes=PROMPT_BLOCK_BYTES)


if __name__ == "__main__":
    typer.run(main)
