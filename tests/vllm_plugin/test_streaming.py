"""Sessions whose input streams in: the request stays, its prompt grows, and the last token of each answer is dropped.

They load, and store nothing: where an answer ends among accepted drafts, or while its request is preempted, vLLM takes
tokens for computed that are not.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.toy.engine import ToyEngine
from tests.support.toy.fleet import Fleet, assert_nothing_is_left
from tests.support.toy.model import answer
from tests.support.toy.shapes import SHAPES
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.test_storms import DRAFTS, storms

CHUNKS = [tokens(count, f"chunk {count}") for count in (100, 7, 41, 64)]
MAX_TOKENS = 12
TOGETHER = pytest.mark.parametrize("together", [False, True], ids=["turn by turn", "all at once"])


def converse(engine: ToyEngine, together: bool) -> tuple[list[int], list[int]]:
    """All that a session is answered, and its text; its chunks come at once, or one after the other's answer."""
    answers = engine.answers
    request = engine.add("session", CHUNKS[0], MAX_TOKENS, resumable=True)
    for nth, chunk in enumerate(CHUNKS[1:], 1):
        if not together:
            engine.step_until(lambda nth=nth: len(answers["session"]) == nth * MAX_TOKENS, "an answer")  # type: ignore[misc]
        engine.extend("session", chunk, MAX_TOKENS)
    engine.step_until(lambda: len(answers["session"]) == len(CHUNKS) * MAX_TOKENS, "the last answer")
    engine.scheduler.add_request(make_request("session", [0]))  # No more input.
    engine.run()
    return answers["session"], list(request.all_token_ids)


def right_answers() -> tuple[list[int], list[int]]:
    """What a session is answered, and the text that it comes to."""
    text: list[int] = []
    answers: list[int] = []
    for chunk in CHUNKS:
        text += chunk
        answers += answer(text, MAX_TOKENS)
        text += answers[-MAX_TOKENS:-1]
    return answers, text


@TOGETHER
@pytest.mark.parametrize(("shape", "mode"), storms(3, ["deepseek", "gemma3", "qwen3-next"]))
def test_a_session_loads_and_stores_nothing(shape: str, together: bool, mode: dict[str, Any], fleet: Fleet) -> None:
    answers, text = right_answers()
    fleet.start(specs=SHAPES[shape], num_blocks=128).generate(CHUNKS[0])
    engine = fleet.start(specs=SHAPES[shape], num_blocks=128, **mode)
    given, said = converse(engine, together)
    assert (given, said[:-1]) == (answers, text)
    assert engine.cached_tokens["session"] == 96
    assert engine.counted("loaded_blocks") and not engine.counted("stored_blocks")
    assert_nothing_is_left(engine)


@TOGETHER
def test_what_vllm_takes_for_computed_after_drafts_reaches_nobody(together: bool, fleet: Fleet) -> None:
    engine = fleet.start(options=DRAFTS, num_blocks=128)
    num_wrong = go_on_where_kv_is_wrong(engine)
    _, text = converse(engine, together)
    assert num_wrong, "where vLLM gets this right, sessions may store again"
    reader = fleet.start(options=DRAFTS, num_blocks=128)
    longer = [*text, *tokens(20, "more")]
    assert reader.generate(longer) == [answer(longer, 8)]


def go_on_where_kv_is_wrong(engine: ToyEngine) -> list[str]:
    """Makes an engine compute with whatever attention reads, as real ones do; returns where that was wrong."""
    wrong: list[str] = []
    engine.found_wrong = lambda rank, request_id, found: wrong.append(str(found))  # type: ignore[method-assign]
    return wrong
