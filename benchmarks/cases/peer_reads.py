"""What does a prompt cost that only another server holds, and what does a lookup that no server can answer?

Three real servers on this host: one that holds the blocks, one that reads from it over TCP, and one without peers. The
bytes between servers stand beside bare sockets, as many as a peer has, whose server reads them from as much memory. A
client that has all of a prompt in its own arrays, through the memory of the server beside it, stands beside one that
loads them from the owner over TCP.

A lookup ends with the answer that nothing is on its way. A directory knows no block of such a prompt; its own round
trip stands beside it. "Ended": the directory was killed some seconds before.

What one directory carries is told by its own CPU time, since it computes in one thread: of announcements, and of
questions for a prompt that another server has. A server of the last row has a million blocks of 16 tokens, and gets ten
prompts of 8,000 new tokens a second.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import redis
import typer

from benchmarks.cases.mooncake_tier import name_of, pages, spec
from benchmarks.harness.measuring import (
    Row,
    alternate,
    at_least,
    at_most,
    gb_per_s,
    kvpool_server,
    ms,
    process,
    report,
    speed_ratio,
    time_ratio,
    timed,
    until_true,
)
from benchmarks.harness.traffic import Bytes
from benchmarks.peers.bare_threads import bare_threads
from kvpool import BlockRun, InPlace
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.types import Lookup
from kvpool.transport.helpers import movers_of
from kvpool_server.tiers.peers.directory import EVERY_TOKENS, MAX_ASKED, RENEW_S, Directory
from testbed.ports import free_port

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
CONNECTIONS = movers_of(len(os.sched_getaffinity(0)), 1)
"""As many as a server has to a peer."""
PROMPTS, PROMPTS_BESIDE = 4, 2
WAIT_MS = 200
NEW_BLOCKS = 64
BARE_SHARE, TCP_REACH, DEAD_REACH = 0.7, 1.3, 1.1
DEAD_S = 3.0
DEADLINE_S = 60.0
PROMPTS_ASKED = 200
SERVER_BLOCKS, BLOCK_TOKENS, SERVER_PROMPTS, SERVER_TOKENS = 1_000_000, 16, 10, 8_000
"""Of the server that one directory carries many of; the last two a second."""


class Reader:
    """A client of one server.

    Args:
        prompts: the names of their blocks; each load is of another one.
        sink: uint8 [bytes of one].
    """

    def __init__(self, endpoint: str, transport: str, prompts: list[list[bytes]], sink: Bytes):
        self._client = Client(ClientConfig(endpoint, transport=transport, timeout_ms=20_000, data_timeout_ms=20_000))
        self._namespace = self._client.open_namespace(spec(BLOCK_BYTES))
        self._runs = [BlockRun(0, names) for names in prompts]
        self._following = itertools.cycle(self._runs)
        self._arrays = list(sink.reshape(-1, BLOCK_BYTES))
        self._new = itertools.count()
        self.found_s = 0.0

    def store(self) -> None:
        """Puts the prompts."""
        for run in self._runs:
            self._client.put_blocks(self._namespace, run, self._arrays)

    def load(self) -> float:
        """Seconds until a prompt is in the arrays; `found_s` is the part until all of it was up."""
        run, lease_id = next(self._following), 0
        began_at = time.perf_counter()
        while (found := self._lookup(run)).retry_after_ms:
            assert time.perf_counter() < began_at + DEADLINE_S, "a block is on its way for ever"
            self._client.rpc.release_quietly(lease_id)
            lease_id = found.lease_id
        self.found_s = time.perf_counter() - began_at
        leased = found.leased(0, 0, len(run))
        self._client.get(self._namespace, found.lease_id, [run], InPlace(self._arrays), leased=leased)
        taken = time.perf_counter() - began_at
        self._client.release([lease_id, found.lease_id])
        return taken

    def _lookup(self, run: BlockRun) -> Lookup:
        found = self._client.rpc.lookup_async(self._namespace, [run], locate=True, wait_ms=WAIT_MS).result()
        assert found is not None
        return found

    def miss(self) -> float:
        """Seconds of a lookup of blocks that nobody has."""
        nth = next(self._new)
        names = [name_of("new", id(self), nth, idx) for idx in range(NEW_BLOCKS)]
        began_at = time.perf_counter()
        found = self._lookup(BlockRun(0, names))
        taken = time.perf_counter() - began_at
        assert not found.retry_after_ms and not found.lease_id, "a block that was never stored is on its way"
        return taken

    def close(self) -> None:
        self._client.close()


def measure_prompts(rounds: int, prompt_bytes: int) -> list[Row]:
    """A prompt that another server holds."""
    count = prompt_bytes // BLOCK_BYTES
    prompts = [[name_of("peer reads", nth, idx) for idx in range(count)] for nth in range(PROMPTS)]
    sink = pages(prompt_bytes)
    with ExitStack() as stack:
        owner = stack.enter_context(kvpool_server(str((PROMPTS + 1) * prompt_bytes)))
        # When a prompt comes again, others have taken its room here.
        tier = ("--tier", f"peers:peer={owner},transport=tcp", "--policy", "lru")
        beside = stack.enter_context(kvpool_server(str(PROMPTS_BESIDE * prompt_bytes), *tier))
        bare = stack.enter_context(bare_threads(CONNECTIONS, BLOCK_BYTES, prompt_bytes))
        far, near = Reader(owner, "tcp", prompts, sink), Reader(beside, "shm", prompts, sink)
        stack.callback(far.close)
        stack.callback(near.close)
        far.store()
        found: list[float] = []

        def through_peer() -> float:
            taken = near.load()
            found.append(near.found_s)
            return taken

        rows = sink.reshape(count, -1)
        measures: dict[str, Callable[[], float]] = {
            "peer": through_peer,
            "tcp": far.load,
            "bare": lambda: timed(lambda: bare.get(rows)),
        }
        taken = alternate(measures, rounds, what="prompts")
    found = found[-rounds:]
    return [
        Row("prompt held by another server, loaded", ms(taken["peer"]), "ms"),
        Row("of that until all was up", ms(found), "ms"),
        Row("prompt loaded from the owner over TCP", ms(taken["tcp"]), "ms"),
        at_most(
            "held by another server over loaded from the owner", time_ratio(taken["peer"], taken["tcp"]), "x", TCP_REACH
        ),
        Row("bytes between servers, from the lookup on", gb_per_s(prompt_bytes, found), "GB/s"),
        Row(f"bare sockets, {CONNECTIONS} connections", gb_per_s(prompt_bytes, taken["bare"]), "GB/s"),
        at_least("between servers / bare sockets", speed_ratio(found, taken["bare"]), "x", BARE_SHARE),
    ]


def measure_misses(rounds: int) -> list[Row]:
    """A lookup that no server can answer."""
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="kvpool-peers-") as folder:
        key_file = Path(folder) / "peers.key"
        key_file.touch(0o600)
        key_file.write_text("5a" * 32)
        port = stack.enter_context(directory(folder))
        with directory(folder) as ended_port:
            owner = stack.enter_context(kvpool_server("64MiB"))
            tiers = {
                "without peers": "",
                "beside a named peer": f"peers:peer={owner},transport=tcp",
                "with a directory": f"peers:directory=redis://127.0.0.1:{port}/0,key_file={key_file}",
                "its directory ended": f"peers:directory=redis://127.0.0.1:{ended_port}/0,key_file={key_file}",
            }
            measures: dict[str, Callable[[], float]] = {}
            for label, tier in tiers.items():
                endpoint = stack.enter_context(kvpool_server("64MiB", *(("--tier", tier) if tier else ())))
                reader = Reader(endpoint, "shm", [], pages(BLOCK_BYTES))
                stack.callback(reader.close)
                measures[label] = reader.miss
            for miss in measures.values():
                miss()
        time.sleep(DEAD_S)
        asked = redis.Redis(port=port)
        stack.callback(asked.close)
        measures["round trip of the directory"] = lambda: timed(asked.ping)
        taken = alternate(measures, rounds, what="misses", shuffled=True)
    alone, trip = taken["without peers"], ms(taken["round trip of the directory"]).figure
    rows = [Row(f"lookup that nobody can answer, {label}", ms(each), "ms") for label, each in taken.items()][:-1]
    rows.append(Row("round trip of the directory", trip, "ms"))
    for label in tiers:
        later = [after - before for after, before in zip(taken[label], alone, strict=True)]
        what = f"later than without peers, {label}"
        if label == "with a directory":
            rows.append(at_most(f"{what}, over its round trip", ms(later).figure / trip, "x", 1.0))
        elif label == "its directory ended":
            rows.append(at_most(f"{what}, over a lookup without", time_ratio(taken[label], alone), "x", DEAD_REACH))
    return rows


def measure_directory(rounds: int) -> list[Row]:
    """Its CPU time."""
    with tempfile.TemporaryDirectory(prefix="kvpool-peers-") as folder, directory(folder) as port:
        announcements, questions = asyncio.run(asyncio.wait_for(_cpu_of_directory(port, rounds), DEADLINE_S))
    each, question = ms(announcements), ms(questions)
    new = SERVER_TOKENS / EVERY_TOKENS
    a_second = SERVER_PROMPTS * (new * each.figure + question.figure)
    a_second += SERVER_BLOCKS * BLOCK_TOKENS / EVERY_TOKENS / RENEW_S * each.figure
    return [
        Row("directory's CPU time, an announcement", 1_000 * each.figure, "us"),
        Row("directory's CPU time, a question", 1_000 * question.figure, "us"),
        Row("servers that fill one directory", 1_000 / a_second, ""),
    ]


async def _cpu_of_directory(port: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of an announcement, and of a question, each round."""
    key, asked = bytes(32), redis.Redis(port=port)
    group = replace(spec(BLOCK_BYTES).groups[0], block_tokens=EVERY_TOKENS)

    def cpu_s() -> float:
        told = asked.info("cpu")
        return float(told["used_cpu_user"] + told["used_cpu_sys"])

    def named(nth: int) -> list[bytes]:  # Blocks of 512 tokens, which are all announced.
        return [name_of("directory", nth, idx) for idx in range(MAX_ASKED)]

    one, other = (Directory(f"redis://127.0.0.1:{port}/0", key, lambda name=name: f"{name}:1") for name in ("a", "b"))
    one.open()
    other.open()
    while asked.dbsize() < 2:  # Each has told its endpoint.
        await asyncio.sleep(0.01)
    announcements, questions = [], []
    for nth in range(rounds):
        before, size = cpu_s(), int(asked.dbsize())
        runs = [named(PROMPTS_ASKED * nth + idx) for idx in range(PROMPTS_ASKED)]
        for name in itertools.chain(*runs):
            one.hold(b"", 0, name, is_there=True)
        while asked.dbsize() < size + PROMPTS_ASKED * MAX_ASKED:
            await asyncio.sleep(0.01)
        announcements.append((cpu_s() - before) / (PROMPTS_ASKED * MAX_ASKED))
        before = cpu_s()
        for run in runs:
            assert await other.owners(b"", 0, run, group) == ["a:1"]
        questions.append((cpu_s() - before) / PROMPTS_ASKED)
    await one.close()
    await other.close()
    asked.close()
    return announcements, questions


@contextmanager
def directory(folder: str) -> Iterator[int]:
    """The port of a Redis or Valkey, which keeps nothing on disk."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        sys.exit("neither valkey-server nor redis-server is installed: apt-get install redis-server")
    port = free_port()
    with process([program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]):
        with redis.Redis(port=port) as asked:
            until_true(functools.partial(_answers, asked), "the directory does not answer")
        yield port


def _answers(asked: redis.Redis) -> bool:
    try:
        return bool(asked.ping())
    except redis.ConnectionError:
        return False


def main(
    rounds: Annotated[int, typer.Option(help="Of each measure.")] = 9,
    prompt_mib: Annotated[int, typer.Option(help="Of the prompt that is read.")] = 1_024,
) -> None:
    """Measures, and reports."""
    rows = measure_prompts(rounds, prompt_mib * MIB) + measure_misses(20 * rounds) + measure_directory(rounds)
    report("peer_reads", rows, rounds=rounds, prompt_bytes=prompt_mib * MIB, block_bytes=BLOCK_BYTES)


if __name__ == "__main__":
    typer.run(main)
