"""What requests may ask for besides a greedy answer, on engines that cut prompts and preempt by priority: a reader that
has computed nothing answers as the writer did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.engine import Engine, EngineSpec, kvpool_transfer_config
from testbed.tiny_models import write
from tests.e2e.conftest import (
    DIGITS,
    FLOAT32,
    PATIENT,
    assert_same,
    assert_same_facts,
    hit_tokens,
    prompt,
    running,
    wait_until_nothing_is_held,
    write_tokenizer,
)
from tests.support.processes import ServerProcess
from tests.support.real_engines import drain

pytestmark = pytest.mark.vllm

LENGTHS = (97, 400)
FULL = [hit_tokens(length) for length in LENGTHS]
THRESHOLD = 70
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "scheduling_policy": "priority",
    "long_prefill_token_threshold": THRESHOLD,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 12,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 48,
}


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, shapes_dir: Path, e2e_server: ServerProcess
) -> Iterator[tuple[Engine, Engine]]:
    """A writer and a reader."""
    directory = tmp_path_factory.mktemp("requests")
    model = write("llama", directory)
    write_tokenizer(model)
    # A prompt that ends while a quarter of these few blocks is pinned would be stored in part.
    transfer = kvpool_transfer_config(e2e_server.endpoint, salt="requests", max_pinned_fraction=1.0, **PATIENT)
    spec = EngineSpec(model, transfer, {**FLOAT32, **OPTIONS}, in_process=True)
    with running(directory, spec, spec) as (writer, reader):
        yield writer, reader
        for engine in (writer, reader):
            drain(engine)
    wait_until_nothing_is_held(e2e_server)


def cold_and_warm(pair: tuple[Engine, Engine], function: str, *arguments: Any) -> tuple[Any, Any]:
    """What the writer returns, which has seen nothing like it, and then the reader."""
    returned = []
    for engine in pair:
        returned.append(engine.call(f"tests.e2e.inside:{function}", *arguments))
        drain(engine)
    return returned[0], returned[1]


def test_several_samples_of_one_prompt(pair: tuple[Engine, Engine]) -> None:
    prompts = [prompt(length, f"samples {length}") for length in LENGTHS]
    pair[0].generate(prompts)  # On the CPU vLLM cannot compute a seeded request's prompt in several steps.
    own, loaded = cold_and_warm(pair, "sample", prompts, 3, 40)
    assert [each["cached"] for each in own] == [each["cached"] for each in loaded] == FULL
    for expected, given in zip(own, loaded, strict=True):
        assert len({tuple(tokens) for tokens, _ in expected["samples"]}) == 3, "samples that are equal show nothing"
        for (tokens, logprobs), (own_tokens, own_logprobs) in zip(given["samples"], expected["samples"], strict=True):
            assert tokens == own_tokens
            assert logprobs == pytest.approx(own_logprobs, abs=1e-4)


def test_beam_search(pair: tuple[Engine, Engine]) -> None:
    prompts = [prompt(length, f"beams {length}") for length in LENGTHS]
    before = pair[1].metrics()["vllm:external_prefix_cache_hits"]
    cold, warm = cold_and_warm(pair, "beam_search", prompts, 3, 40)
    assert pair[1].metrics()["vllm:external_prefix_cache_hits"] - before >= sum(FULL)
    for beams, expected in zip(warm, cold, strict=True):
        assert len(expected) == 3
        assert [tokens for tokens, _ in beams] == [tokens for tokens, _ in expected]
        assert [logprob for _, logprob in beams] == pytest.approx([logprob for _, logprob in expected], abs=1e-3)


def test_structured_outputs(pair: tuple[Engine, Engine]) -> None:
    prompts = [prompt(length, f"structured {length}") for length in LENGTHS]
    cold, warm = cold_and_warm(pair, "structured", prompts, "[0-9]{40}", 60)
    assert [each["cached"] for each in warm] == FULL
    assert_same_facts(warm, cold)
    for each in cold:
        assert len(each["tokens"]) >= 40 and set(each["tokens"][:40]) <= set(DIGITS)
    # What was decoded under a grammar is shared by whoever goes on from it without one.
    turns = [[*text, *each["tokens"], *prompt(20, "next")] for text, each in zip(prompts, cold, strict=True)]
    loaded, computed = (engine.generate(turns) for engine in reversed(pair))
    assert [each.cached_tokens for each in loaded] == [(length + 39) // 32 * 32 for length in LENGTHS]
    assert [each.tokens for each in loaded] == [each.tokens for each in computed]
    for engine in pair:
        drain(engine)


def test_requests_that_give_way_to_those_of_higher_priority(pair: tuple[Engine, Engine]) -> None:
    prompts = [prompt(150 + 20 * nth, f"priority {nth}") for nth in range(9)]
    priorities = [2, 2, 2, 1, 1, 1, 0, 0, 0]
    preemptions = [engine.metrics()["vllm:num_preemptions"] for engine in pair]
    cold, warm = cold_and_warm(pair, "prioritised", prompts, priorities, 80)
    expected = [pair[0].generate([text], max_tokens=80)[0] for text in prompts]
    assert [each["tokens"] for each in cold] == [each.tokens for each in expected]
    assert_same_facts(warm, cold)
    for engine, before in zip(pair, preemptions, strict=True):
        assert engine.metrics()["vllm:num_preemptions"] > before, "the test wants preemption"
    assert sum(each["cached"] for each in warm) > sum(each["cached"] for each in cold)
    drain(pair[0])


def test_long_prompts_that_are_computed_bit_by_bit(pair: tuple[Engine, Engine]) -> None:
    """In chunks of no whole number of blocks, as long as others wait."""
    writer, reader = pair
    prompts = [prompt(length, f"long {length}") for length in (500, 333, 97, 200)]
    cold = writer.generate(prompts)
    drain(writer)
    warm = reader.generate(prompts)
    drain(reader)
    assert [each.cached_tokens for each in warm] == [hit_tokens(len(each)) for each in prompts]
    assert_same(warm, cold)
