"""Hints of requests: what is parsed and refused, and what the pool is told when."""

from __future__ import annotations

import threading
import tracemalloc
from string import ascii_lowercase
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.request import Request

from kvpool.client.client import Client
from kvpool.protocol.errors import UnavailableError
from tests.support.effort import effort
from tests.support.held import held_by
from tests.support.processes import wait_for
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import Core, fill, lose_pool
from vllm_plugin.scheduler import hints
from vllm_plugin.scheduler.hints import MAX_PIN_S, MAX_UNKNOWN, RequestHints, parse

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("params", "hints", "refused"),
    [
        *((each, {}, []) for each in (None, {}, {"do_remote_prefill": True}, {"kvpool": {}}, [], "kvpool", 3)),
        ({"kvpool": {"pin_s": 600, "expire": True}, "other": 1}, {"pin_s": 600, "expire": True}, []),
        ({"kvpool": "pin"}, {}, ["kvpool = 'pin' is no object; give one with pin_s, expire or prefetch"]),
        ({"kvpool": {"pin_s": 0}}, {}, [f"pin_s = 0 is no pin; give 1 to {MAX_PIN_S} seconds"]),
        ({"kvpool": {"pin_s": MAX_PIN_S + 1}}, {}, [f"pin_s = {MAX_PIN_S + 1} is no pin"]),
        ({"kvpool": {"pin_s": True}}, {}, ["pin_s = True is no pin"]),
        ({"kvpool": {"pin_s": "600", "prefetch": True}}, {"prefetch": True}, ["pin_s = '600' is no pin"]),
        ({"kvpool": {"expire": 1, "pin_s": 5}}, {"pin_s": 5}, ["expire = 1 is neither true nor false; give one of"]),
        ({"kvpool": {"pin_s": 10**5_000}}, {}, ["pin_s = a value of type int is no pin"]),
        ({"kvpool": {"expire": [10**5_000]}}, {}, ["expire = a value of type list is neither true nor false"]),
        ({"kvpool": {10**5_000: 1}}, {}, ["unknown key a value of type int; give pin_s, expire or prefetch"]),
        ({"kvpool": {**dict.fromkeys(ascii_lowercase), "pin_s": 5}}, {"pin_s": 5}, ["unknown key"] * MAX_UNKNOWN),
    ],
)
def test_hints_are_read_beside_what_is_refused_by_name(
    params: object, hints: dict[str, Any], refused: list[str]
) -> None:
    found, told = parse(params)
    assert found == RequestHints(**hints) and len(told) == len(refused)
    assert all(sentence.startswith(start) for sentence, start in zip(told, refused, strict=True))


def test_long_values_are_cut_before_they_are_shown() -> None:
    text = "x" * 10_000_000
    tracemalloc.start()
    found, refused = parse({"kvpool": {"pin_s": text, "expire": [text], text: 1}})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == RequestHints() and all(len(sentence) < 200 for sentence in refused)
    assert peak < len(text), "a whole value was copied"


@settings(max_examples=effort(40))
@given(values)
def test_nothing_that_a_request_can_say_raises(value: object) -> None:
    for params in (value, {"kvpool": value}, {"kvpool": {"pin_s": value, "expire": value, "prefetch": value}}):
        found, refused = parse(params)
        assert isinstance(found, RequestHints)
        assert all(len(sentence) < 300 and sentence.isprintable() for sentence in refused)


# What the pool is told


def _request(name: str, params: object, count: int = 64) -> Request:
    return make_request(name, tokens(count, name), extra_args={"kv_transfer_params": params})


def _client(core: Core) -> Client:
    return core.side.stages.sessions[0].client


def _pinned_bytes(core: Core) -> int:
    namespace = core.side.stages.sessions[0].namespace
    assert namespace is not None
    infos = _client(core).admin.namespaces()
    return next(info.pinned_bytes for info in infos if info.fingerprint == namespace.fingerprint)


def _slot_bytes(core: Core) -> int:
    return core.side.stages.specs[0].groups[0].slot_bytes


def _counter(core: Core, name: str) -> int:
    return _client(core).admin.stats().counters[name]


def _ended(core: Core, request: Request, *jobs: Any) -> None:
    core.finish(request)
    steps = [core.step()]
    core.report(*[job.job_id for job in jobs], *(job.job_id for step in steps for job in step.stores))
    for _ in range(3):
        core.step()
    assert not any(held_by(core.side).values()), held_by(core.side)


def test_a_prompt_is_prefetched_with_the_first_question_and_pinned_when_it_gets_its_blocks(one: Core) -> None:
    request = _request("pin", {"kvpool": {"pin_s": 60, "prefetch": True}})
    fill(one, request.block_hashes[:4])
    before = _counter(one, "prefetch_hints")
    external = one.ask(request)
    wait_for(lambda: _counter(one, "prefetch_hints") == before + 1, "the prefetch")
    one.ask(request)
    one.allocate(request, external)
    wait_for(lambda: _pinned_bytes(one) == 4 * _slot_bytes(one), "the pin")
    one.report(finished_recving={"pin"} if external else None)
    _ended(one, request, *one.step((request, 64 - external)).stores)
    assert _counter(one, "prefetch_hints") == before + 1, "it was told twice"


def test_a_prompt_is_pinned_as_it_is_stored_and_the_answer_is_not(one: Core) -> None:
    request = _request("store", {"kvpool": {"pin_s": 60}})
    assert one.ask(request) == 0
    one.allocate(request, 0)
    (job,) = one.step((request, 64)).stores
    fill(one, request.block_hashes[:4])  # What the worker does.
    one.report(job.job_id)
    one.step()
    wait_for(lambda: _pinned_bytes(one) == 4 * _slot_bytes(one), "the pin")
    assert held_by(one.side)["requests with hints"] == 1
    _ended(one, request)
    wait_for(lambda: _pinned_bytes(one) == 4 * _slot_bytes(one), "the pin")


def test_a_prompt_expires_once_its_last_store_has_ended(one: Core) -> None:
    request = _request("over", {"kvpool": {"expire": True}})
    assert one.ask(request) == 0
    one.allocate(request, 0)
    (job,) = one.step((request, 64)).stores
    before = _counter(one, "expired_by_hint_blocks")
    one.finish(request)
    one.step()
    assert held_by(one.side)["requests with hints"] == 1, "its stores have not ended"
    fill(one, request.block_hashes[:4])
    one.report(job.job_id)
    for _ in range(3):
        one.step()
    wait_for(lambda: _counter(one, "expired_by_hint_blocks") == before + 4, "the expiry")
    assert not any(held_by(one.side).values())


def test_bad_hints_are_logged_by_name_and_the_request_is_served(one: Core, caplog: pytest.LogCaptureFixture) -> None:
    for nth in range(2):
        request = _request(f"bad{nth}", {"kvpool": {"pinn_s": 60, "expire": "yes"}})
        assert one.ask(request) == 0
        one.allocate(request, 0)
        _ended(one, request, *one.step((request, 64)).stores)
    assert caplog.text.count("unknown key 'pinn_s'; give pin_s, expire or prefetch") == 1, "logged once"
    assert "expire = 'yes' is neither true nor false" in caplog.text
    counted = one.counted()
    assert counted["refused_hints"] == 4 and "unexpected_errors" not in counted


def test_a_pool_that_is_away_gets_no_hints(one: Core) -> None:
    lose_pool(one)
    request = _request("away", {"kvpool": {"pin_s": 60, "prefetch": True, "expire": True}})
    assert one.ask(request) == 0
    one.allocate(request, 0)
    _ended(one, request, *one.step((request, 64)).stores)
    assert one.counted()["lost_hints"] >= 3


def test_hints_that_pile_up_are_lost(one: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, rpc, told = threading.Event(), _client(one).rpc, []
    monkeypatch.setattr(rpc, "hint", lambda *hint: told.append(hint) or goes_on.wait(60))
    monkeypatch.setattr(hints, "END_S", 0.05)
    for nth in range(hints.MAX_WAITING + 6):  # The thread has taken one of them, or is about to.
        one.ask(_request(f"pile {nth}", {"kvpool": {"prefetch": True}}, 16))
    counted = one.counted()
    wait_for(lambda: told, "the first hint to be told")
    one.ask(_request("last", {"kvpool": {"prefetch": True}}, 16))
    one.side.hints.close()
    goes_on.set()
    thread = one.side.hints._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive() and len(told) == 1, "the end has waited for hints that pile up"
    assert counted["lost_hints"] in (5, 6)


def test_an_error_ends_one_hint_alone_and_what_waits_is_told_before_the_end(
    one: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, told, failed = threading.Event(), list[object](), list[BaseException]()

    def hint(*_: object) -> None:
        assert goes_on.wait(60)
        told.append(None)
        if len(told) < 3:
            raise (UnavailableError("away"), KeyError("unexpected"))[len(told) - 1]

    monkeypatch.setattr(_client(one).rpc, "hint", hint)
    monkeypatch.setattr(one.side.guard, "failed", lambda what, error: failed.append(error))
    for nth in range(3):
        one.ask(_request(f"r{nth}", {"kvpool": {"prefetch": True}}, 16))
    goes_on.set()
    for _ in range(2):
        one.side.hints.close()
    assert len(told) == 3 and [type(error) for error in failed] == [KeyError]
    assert one.counted()["lost_hints"] == 1
