"""Engines behind an API server: sessions whose input streams in, pauses, resets under requests, data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.engine import kvpool_transfer_config
from testbed.tiny_models import write
from tests.conftest import StartServer
from tests.e2e.async_engine import AsyncEngine
from tests.e2e.conftest import (
    FLOAT32,
    PATIENT,
    assert_same_facts,
    hit_tokens,
    pool_stats,
    prompt,
    wait_until_nothing_is_held,
)
from tests.support.processes import ServerProcess, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LENGTH = 300
FULL = hit_tokens(LENGTH)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("sessions-server"), "--memory", "64MiB", "--grace-ms", "100")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def engines(
    server: ServerProcess, shapes_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[AsyncEngine, AsyncEngine]]:
    """A writer and a reader; nothing is held in the pool when they are gone."""
    model, logs = write("llama", shapes_dir), tmp_path_factory.mktemp("sessions")
    transfer = kvpool_transfer_config(server.endpoint, **PATIENT)
    with (
        AsyncEngine(model, transfer, FLOAT32, logs / "writer.log") as writer,
        AsyncEngine(model, transfer, FLOAT32, logs / "reader.log") as reader,
    ):
        for engine in (writer, reader):
            wait_until_pooled(engine.wait(), server)
        yield writer, reader
    wait_until_nothing_is_held(server)


def wait_until_pooled(engine: AsyncEngine, server: ServerProcess) -> None:
    wait_for(lambda: f"scheduler: kvpool at {server.endpoint}," in engine.log(), "the engine to find the pool", 60)


def drain(engine: AsyncEngine) -> None:
    """Until every store has ended and the engine's own cache is empty."""
    wait_for(lambda: engine.ask("reset_prefix_cache"), "the engine's blocks to be free", 60)


def test_a_session_whose_input_streams_in_loads_what_whole_prompts_have_stored(
    engines: tuple[AsyncEngine, AsyncEngine], server: ServerProcess
) -> None:
    writer, reader = engines
    chunks = [prompt(length, f"chunk {length}") for length in (150, 70, 200)]
    max_tokens = 41
    before = pool_stats(server).num_entries
    streamed = writer.session(chunks, max_tokens)
    drain(writer)
    assert len(streamed) == len(chunks)
    assert pool_stats(server).num_entries == before, "a session stores nothing (see docs/reference/compatibility.md)"
    # The last token of each answer is dropped when the next chunk comes: it was never computed.
    text: list[int] = []
    for chunk, expected in zip(chunks, streamed, strict=True):
        text += chunk
        assert_same_facts(writer.generate([text], max_tokens), [expected])
        text += expected["tokens"][:-1]
    drain(writer)
    again = reader.session(chunks, max_tokens)
    assert again[0]["cached"] == hit_tokens(len(chunks[0]))
    assert_same_facts(again, streamed)
    drain(reader)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("clear_cache", [True, False], ids=["cleared", "not cleared"])
def test_requests_of_a_paused_engine(mode: str, clear_cache: bool, engines: tuple[AsyncEngine, AsyncEngine]) -> None:
    writer, reader = engines
    prompts = [prompt(LENGTH, f"{mode} {clear_cache} {nth}") for nth in range(3)]
    expected = writer.generate(prompts, 60)
    drain(writer)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("pause_generation", {"mode": mode, "clear_cache": clear_cache}),
        ("resume_generation", {}),
    ]
    answers = reader.generate_meanwhile(prompts, 60, calls)
    for answer, right in zip(answers, expected, strict=True):
        assert answer["reason"] == ("abort" if mode == "abort" else "length")
        assert answer["tokens"] == right["tokens"][: len(answer["tokens"])]
        assert answer["logprobs"] == pytest.approx(right["logprobs"][: len(answer["tokens"])], abs=1e-4)
    drain(reader)
    warm = reader.generate(prompts, 60)
    assert [each["cached"] for each in warm] == [FULL] * 3
    assert_same_facts(warm, expected)
    drain(reader)


def test_running_requests_that_a_reset_sends_back(engines: tuple[AsyncEngine, AsyncEngine]) -> None:
    writer, reader = engines
    prompts = [prompt(LENGTH, f"sent back {nth}") for nth in range(3)]
    expected = writer.generate(prompts, 60)
    drain(writer)
    drain(reader)
    reset = ("reset_prefix_cache", {"reset_running_requests": True, "reset_connector": True})
    assert_same_facts(reader.generate_meanwhile(prompts, 60, [reset]), expected)
    drain(reader)
    assert_same_facts(reader.generate(prompts, 60), expected)
    drain(reader)


def test_ranks_of_a_data_parallel_engine_share_what_each_computes(
    pool_server: StartServer, shapes_dir: Path, tmp_path: Path
) -> None:
    server = pool_server("--memory", "64MiB", "--grace-ms", "100")
    transfer = kvpool_transfer_config(server.endpoint, **PATIENT)
    options = {**FLOAT32, "data_parallel_size": 2}
    prompts = [prompt(LENGTH, f"data parallel {nth}") for nth in range(2)]
    with AsyncEngine(write("llama", shapes_dir), transfer, options, tmp_path / "engine.log") as engine:
        engine.wait()
        wait_for(lambda: engine.log().count("scheduler: kvpool at") == 2, "both ranks to find the pool", 60)
        for of_rank, text in enumerate(prompts):
            cold = engine.generate([text], data_parallel_rank=of_rank)
            assert cold[0]["cached"] == 0
            num_stored = (of_rank + 1) * (FULL // 32)
            wait_for(lambda count=num_stored: pool_stats(server).num_entries >= count, "the blocks to be stored")  # type: ignore[misc]
            warm = engine.generate([text], data_parallel_rank=1 - of_rank)
            assert warm[0]["cached"] == FULL
            assert_same_facts(warm, cold)
    wait_until_nothing_is_held(server)
