"""Real vLLM engines and kvpool servers. Engines are forked from a process that has imported vLLM (`fork_server`).

Oracles, from weakest to strongest: the tokens of an engine without a connector; its logprobs (float32 makes both equal
but for the order of sums); and, bit for bit, the logprobs of an engine that hits its own prefix cache.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.v1 import pool_pb2 as pb
from testbed.engine import BLOCK_TOKENS, Answer, Engine, EngineSpec, kvpool_transfer_config
from testbed.tiny_llama import Shape, write
from tests.support.processes import ServerProcess, wait_for
from tests.support.real_engines import drain, one_by_one, small_processes, wait_until_connected

SMALL = Shape(layers=4, hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64, vocab=2048, max_tokens=4096)
FLOAT32: dict[str, Any] = {"dtype": "float32", "max_model_len": 4096, "kv_cache_memory_bytes": 256 << 20}
MORE = pytest.mark.more
"""Left to `make test-all`: proves no claim of the README that another test does not (docs/explanation/testing.md)."""
NEEDS_FP8_KV = pytest.mark.skipif(
    not {"avx512f", "amx_tile"} & set(Path("/proc/cpuinfo").read_text().split()),
    reason="vLLM's CPU build keeps KV in fp8 only on processors with AVX-512 or AMX",
)
PATIENT: dict[str, Any] = {
    "lookup_timeout_ms": 60_000,
    "load_timeout_ms": 60_000,
    "store_timeout_ms": 60_000,
    "decline_slow_loads": False,
}
"""For tests that assert hits: deadlines that two busy cores do not miss."""

DIGITS = range(10, 20)
"""Tokens that `write_tokenizer` makes the digits 0 to 9."""

StartEngines = Callable[..., list[Engine]]


def prompt(tokens: int, seed: object = 0) -> list[int]:
    """Token ids that depend on their seed alone; two seeds share no prefix."""
    picks = random.Random(repr(seed))
    return [picks.randrange(10, SMALL.vocab) for _ in range(tokens)]


def write_tokenizer(model: Path) -> None:
    """Writes a tokenizer of whole words, for what wants one: structured outputs, beam search, pooling."""
    words = {f"<{token}>": token for token in range(SMALL.vocab)}
    for token in DIGITS:
        del words[f"<{token}>"]
        words[str(token - DIGITS[0])] = token
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<0>"},
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<2>", "unk_token": "<0>"})
    )


def hits(engine: Engine, each: list[int], right: Answer, tokens: int) -> bool:
    """Whether all of a prompt is loaded. It is computed, and answers the same, until the engine has noticed a restart,
    and where bringing its blocks up took longer than computing them would: they are there the next time."""
    (answer,) = one_by_one(engine, [each])
    assert_same([answer], [right])
    drain(engine)
    return answer.cached_tokens == tokens


def hit_tokens(num_tokens: int) -> int:
    """Tokens of a prompt that a full hit covers: whole blocks, and never the last token."""
    return (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def pool_stats(server: ServerProcess) -> pb.StatsResponse:
    with Client(ClientConfig(server.endpoint, timeout_ms=60_000)) as client:
        return client.admin.stats()


def clear(server: ServerProcess) -> int:
    """Returns how many blocks the pool had."""
    with Client(ClientConfig(server.endpoint, timeout_ms=60_000)) as client:
        return client.admin.clear()


def wait_until_nothing_is_held(server: ServerProcess, deadline_s: float = 60.0) -> None:
    """Every lease and ticket has ended, and no slot is kept for a late writer."""

    def held() -> tuple[int, int, int, int]:
        stats = pool_stats(server)
        return stats.num_leases, stats.num_tickets, stats.num_quarantined, stats.num_incomplete

    wait_for(lambda: not any(held()), "leases, tickets, quarantine and incomplete entries to end", deadline_s)


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer], tolerance: float = 1e-4) -> None:
    """The same tokens, and logprobs within `tolerance`."""
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    for answer, other in zip(answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(other.logprobs, abs=tolerance)


def assert_same_facts(answers: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """The same of what `tests.e2e.inside` and `tests.e2e.async_engine` tell of answers."""
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in expected]
    for answer, other in zip(answers, expected, strict=True):
        assert answer["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)


def assert_shared(writer: Engine, reader: Engine, prompts: Sequence[list[int]]) -> list[Answer]:
    """One engine loads all that another stores, and answers bit for bit as that one does from its own prefix cache.

    Returns the answers.
    """
    one_by_one(writer, prompts)
    own_cache = one_by_one(writer, prompts)
    drain(writer)
    loaded = one_by_one(reader, prompts)
    assert [answer.cached_tokens for answer in loaded] == [hit_tokens(len(each)) for each in prompts]
    assert_same(loaded, own_cache, tolerance=0)
    return own_cache


@contextmanager
def running(log_dir: Path, *specs: EngineSpec) -> Iterator[list[Engine]]:
    """Engines, started at the same time and stopped at the same time."""
    with ThreadPoolExecutor(len(specs)) as threads:
        starts = [threads.submit(Engine, spec, log_dir / f"{idx}.log") for idx, spec in enumerate(specs)]
    try:
        engines = [start.result() for start in starts]
        for engine, spec in zip(engines, specs, strict=True):
            wait_until_connected(engine, spec.transfer)
        yield engines
    finally:
        started = [start.result() for start in starts if start.exception() is None]
        with ThreadPoolExecutor(len(specs)) as threads:
            list(threads.map(Engine.stop, started))


@pytest.fixture(scope="session", autouse=True)
def _small_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with small_processes(tmp_path_factory.mktemp("forks")):
        yield


@pytest.fixture(scope="session")
def shapes_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `testbed.tiny_models.write` puts the models of this run."""
    return tmp_path_factory.getbasetemp() / "shapes"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "small", SMALL)


@pytest.fixture(scope="session")
def _e2e_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log_dir = tmp_path_factory.mktemp("e2e-server")
    with tempfile.TemporaryDirectory(prefix="kvpool-") as sockets:
        flags = ("--unix-listen", f"{sockets}/kvpool.sock", "--memory", "256MiB", "--grace-ms", "100")
        server = ServerProcess(log_dir, *flags)
        yield server
        server.stop()


@pytest.fixture(scope="module")
def e2e_server(_e2e_process: ServerProcess) -> Iterator[ServerProcess]:
    """A server that no test ends, fills or corrupts, and that each module finds empty.

    Its arena has eight extents, and blocks of one size take one at least: models of many modules would fill it.
    """
    with Client(ClientConfig(_e2e_process.endpoint, timeout_ms=60_000)) as client:
        client.admin.clear()
    before = pool_stats(_e2e_process).counters["evicted_blocks"]
    yield _e2e_process
    evicted = pool_stats(_e2e_process).counters["evicted_blocks"] - before
    assert not evicted, "the module has filled the server: give it one of its own"


@contextmanager
def _starter(log_dir: Path, model: Path) -> Iterator[StartEngines]:
    started: list[Engine] = []

    def start(*transfers: dict[str, Any] | None, options: Sequence[dict[str, Any]] = ()) -> list[Engine]:
        """Starts engines at the same time, one a transfer config; `options` of `vllm.LLM` in the same order."""

        def one(idx: int) -> Engine:
            chosen = {**FLOAT32, **(options[idx] if options else {})}
            spec = EngineSpec(model, transfers[idx], chosen, in_process="tensor_parallel_size" not in chosen)
            log_path = log_dir / f"engine-{len(list(log_dir.glob('*.log')))}-{idx}.log"
            engine = Engine(spec, log_path)
            started.append(engine)
            wait_until_connected(engine, spec.transfer)
            return engine

        with ThreadPoolExecutor(len(transfers)) as threads:
            futures = [threads.submit(one, idx) for idx in range(len(transfers))]
        return [future.result() for future in futures]

    try:
        yield start
    finally:
        with ThreadPoolExecutor(max(1, len(started))) as threads:
            list(threads.map(Engine.stop, started))


@pytest.fixture(scope="module")
def start_engines(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[StartEngines]:
    """`start_engines(transfer, None, options=[{}, {"tensor_parallel_size": 2}])`; they live as long as the module."""
    with _starter(tmp_path_factory.mktemp("engines"), model) as start:
        yield start


@pytest.fixture(scope="session")
def _common_engines(
    tmp_path_factory: pytest.TempPathFactory, model: Path, _e2e_process: ServerProcess
) -> Iterator[list[Engine]]:
    pooled = kvpool_transfer_config(_e2e_process.endpoint, transport="shm", **PATIENT)
    with _starter(tmp_path_factory.mktemp("common-engines"), model) as start:
        yield start(None, pooled)


@pytest.fixture(scope="session")
def plain_engine(_common_engines: list[Engine]) -> Engine:
    """An engine without a connector: the oracle of right answers."""
    return _common_engines[0]


@pytest.fixture(scope="module")
def engine(_common_engines: list[Engine], e2e_server: ServerProcess) -> Engine:
    """An engine with kvpool over shared memory; stores and loads."""
    return _common_engines[1]


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def example_connector(files: Path) -> dict[str, Any]:
    """vLLM's connector that keeps KV in files named by tokens alone."""
    extra = {"shared_storage_path": str(files)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
