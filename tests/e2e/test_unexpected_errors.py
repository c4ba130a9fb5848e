"""Errors that nobody foresees inside the connector of a real engine: it goes on, and answers as one without a pool."""

from __future__ import annotations

import pytest

from testbed.engine import Engine, kvpool_transfer_config
from tests.e2e.conftest import PATIENT, StartEngines, assert_same, hit_tokens, prompt
from tests.support.processes import ServerProcess, wait_for
from tests.support.real_engines import drain

pytestmark = pytest.mark.vllm

ERRORS = ("RuntimeError", "IndexError", "MemoryError")
PLACES = {
    "lookup sent": ("PoolRpc", "lookup_async"),
    "load": ("Client", "get"),
    "store": ("Client", "put"),
    "blocks of a load": ("Loads", "parts"),
    "lookup answered": ("PendingLookup", "result"),
    "answer judged": ("Admission", "boundary"),
    "load begun": ("Loads", "begin"),
    "leased slots": ("RequestLookup", "leased"),
    "bytes of a transfer": ("BlockMover", "move"),
    "PutStart": ("PoolRpc", "put_start"),
    "PutEnd": ("PoolRpc", "put_end"),
    "release": ("PoolRpc", "release_quietly"),
    "stores of a step": ("Stores", "build"),
    "a request's end": ("Stores", "finish"),
    "peers": ("PeerLoads", "prepare"),
    "ends of loads": ("Loads", "ended"),
    "load policy": ("LoadPolicy", "step_began"),
}
LENGTHS = (100, 300)


@pytest.fixture(scope="module")
def breakable(start_engines: StartEngines, e2e_server: ServerProcess) -> Engine:
    """An engine whose connector can be broken."""
    return start_engines(kvpool_transfer_config(e2e_server.endpoint, **PATIENT))[0]


@pytest.mark.parametrize("what", PLACES)
def test_an_engine_whose_connector_raises_answers_right_and_heals(
    what: str, breakable: Engine, plain_engine: Engine
) -> None:
    kept = [prompt(length, f"raises, kept {what}") for length in LENGTHS]
    expected = plain_engine.generate(kept)

    def all_hit() -> bool:
        drain(breakable)
        answers = breakable.generate(kept)
        assert_same(answers, expected)
        return [answer.cached_tokens for answer in answers] == [hit_tokens(length) for length in LENGTHS]

    wait_for(all_hit, "the pool to be used", 60)
    for nth, error in enumerate(ERRORS):
        drain(breakable)
        new = [prompt(length, f"raises, new {what} {error}") for length in LENGTHS]
        breakable.call("tests.e2e.inside:break_places", [PLACES[what]], error, nth % 2 == 1)
        try:
            answers = breakable.generate(kept + new)
            # Stores go on after the answers.
            wait_for(lambda: breakable.call("tests.e2e.inside:num_raised"), f"a request to come by {what}", 60)
        finally:
            breakable.call("tests.e2e.inside:mend_places")
        assert_same(answers, expected + plain_engine.generate(new))
        wait_for(all_hit, "the pool to be used again", 60)
    assert "unexpected error" in breakable.log()
