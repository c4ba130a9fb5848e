"""The main job: what one engine has computed, another loads, and answers the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from testbed.engine import BLOCK_TOKENS, Answer, Engine, kvpool_transfer_config
from tests.e2e.conftest import PATIENT, StartEngines, assert_same, hit_tokens, pool_stats, prompt
from tests.support.processes import ServerProcess, wait_for
from tests.support.real_engines import drain, one_by_one

pytestmark = pytest.mark.vllm

# Shorter than a block, one block, one token more, N blocks, one token less and more, and a long one.
LENGTHS = (BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 255, 256, 257, 2000)
PROMPTS = [prompt(length, f"share {length}") for length in LENGTHS]


@pytest.fixture(scope="module")
def others(start_engines: StartEngines, e2e_server: ServerProcess) -> list[Engine]:
    """One that shares memory by a Unix socket, and one over TCP that does not store what it decodes."""
    return start_engines(
        kvpool_transfer_config(e2e_server.unix_endpoint, **PATIENT),
        kvpool_transfer_config(e2e_server.endpoint, transport="tcp", store_decoded=False, **PATIENT),
    )


@pytest.fixture(scope="module")
def shm_reader(others: list[Engine]) -> Engine:
    return others[0]


@pytest.fixture(scope="module")
def tcp_reader(others: list[Engine]) -> Engine:
    return others[1]


@pytest.fixture(scope="module")
def runs(engine: Engine, plain_engine: Engine) -> dict[str, list[Answer]]:
    """What the engine without kvpool answers, the storing engine cold, and the storing engine from its own cache."""
    answers = {
        "plain": one_by_one(plain_engine, PROMPTS),
        "cold": one_by_one(engine, PROMPTS),
        "own cache": one_by_one(engine, PROMPTS),
    }
    drain(engine)
    return answers


def test_a_cold_engine_answers_as_one_without_kvpool(runs: dict[str, list[Answer]]) -> None:
    assert [answer.cached_tokens for answer in runs["cold"]] == [0] * len(PROMPTS)
    assert_same(runs["cold"], runs["plain"])


def test_a_prompt_is_there_for_others_while_its_answer_is_decoded(
    engine: Engine, shm_reader: Engine, e2e_server: ServerProcess
) -> None:
    each = prompt(500, "while it is decoded")
    before = pool_stats(e2e_server).num_entries
    with ThreadPoolExecutor(1) as threads:
        answering = threads.submit(engine.generate, [each], max_tokens=400)
        wait_for(
            lambda: pool_stats(e2e_server).num_entries >= before + len(each) // BLOCK_TOKENS, "the prompt's blocks"
        )
        (answer,) = shm_reader.generate([each], max_tokens=1)
        assert not answering.done() and answer.cached_tokens == hit_tokens(len(each))
        assert len(answering.result()[0].tokens) == 400
    drain(engine)


@pytest.mark.parametrize("reader", ["shm_reader", "tcp_reader"])
def test_another_engine_loads_what_was_stored_bit_for_bit(
    reader: str, runs: dict[str, list[Answer]], request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(reader)
    loaded = one_by_one(engine, PROMPTS)
    assert [answer.cached_tokens for answer in loaded] == [hit_tokens(length) for length in LENGTHS]
    assert [answer.cached_tokens for answer in runs["own cache"]] == [hit_tokens(length) for length in LENGTHS]
    assert_same(loaded, runs["cold"])
    # The same kernels over the same bytes: nothing may differ at all.
    assert [answer.logprobs for answer in loaded] == [answer.logprobs for answer in runs["own cache"]]
    drain(engine)


def test_the_readers_use_the_transport_they_were_told_to(shm_reader: Engine, tcp_reader: Engine) -> None:
    assert "transport shm" in shm_reader.log()
    assert "transport shm" not in tcp_reader.log() and "transport tcp" in tcp_reader.log()


def test_prompts_submitted_together_all_load(
    shm_reader: Engine, plain_engine: Engine, runs: dict[str, list[Answer]]
) -> None:
    extended = [text + prompt(40, f"after {len(text)}") for text in PROMPTS]
    answers = shm_reader.generate(extended)
    assert [answer.cached_tokens for answer in answers] == [
        len(text) // BLOCK_TOKENS * BLOCK_TOKENS for text in PROMPTS
    ]
    assert_same(answers, plain_engine.generate(extended))
    drain(shm_reader)


def test_the_next_turn_of_a_conversation_hits_what_was_decoded(
    engine: Engine, shm_reader: Engine, plain_engine: Engine
) -> None:
    first = prompt(100, "conversation")
    reply = engine.generate([first], max_tokens=100)[0].tokens
    drain(engine)
    second = first + reply + prompt(20, "second turn")
    answer = shm_reader.generate([second])[0]
    # The last of the 200 tokens was sampled, never computed: the block it would complete does not exist.
    assert answer.cached_tokens == 199 // BLOCK_TOKENS * BLOCK_TOKENS
    assert_same([answer], plain_engine.generate([second]))
    drain(shm_reader)


def test_the_block_of_the_last_sampled_token_is_not_stored(engine: Engine, shm_reader: Engine) -> None:
    first = prompt(100, "exactly to the end of a block")
    reply = engine.generate([first], max_tokens=28)[0].tokens  # 128 tokens, of which the last has no KV.
    drain(engine)
    answer = shm_reader.generate([first + reply + prompt(20, "next")])[0]
    assert answer.cached_tokens == 96
    drain(shm_reader)


def test_decoded_blocks_are_not_stored_where_that_is_switched_off(
    tcp_reader: Engine, shm_reader: Engine, plain_engine: Engine
) -> None:
    first = prompt(100, "prompts only")
    reply = tcp_reader.generate([first], max_tokens=100)[0].tokens
    drain(tcp_reader)
    second = first + reply + prompt(20, "second turn")
    answer = shm_reader.generate([second])[0]
    assert answer.cached_tokens == 96
    assert_same([answer], plain_engine.generate([second]))
    drain(shm_reader)
