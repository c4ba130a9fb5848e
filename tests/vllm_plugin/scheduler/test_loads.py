"""Loads: which have room beside those under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.groups import Geometry, PoolGroup
from vllm_plugin.model.kinds import FullAttention
from vllm_plugin.scheduler.load_policy import PrefillQueue
from vllm_plugin.scheduler.loads import Loads
from vllm_plugin.scheduler.lookups import RequestLookup

BLOCK = 16
GROUP = PoolGroup(FullAttention(block_tokens=BLOCK), (0,))


def loads() -> Loads:
    names: Any = SimpleNamespace(are_known=lambda request: False)  # Which blocks are loaded does not matter here.
    geometry = Geometry([GROUP], alignment=BLOCK, names=names, num_blocks=1_000, step_tokens=2048)
    spec = SimpleNamespace(groups=[SimpleNamespace(slot_bytes=1)])
    stages: Any = SimpleNamespace(specs=[spec], transport="shm", boot_token=1, weights_epoch="")
    return Loads(geometry, stages, ConnectorConfig("127.0.0.1:1"), PrefillQueue(), Recorder())


def request(name: str, num_blocks: int) -> Any:
    return SimpleNamespace(request_id=name, num_tokens=num_blocks * BLOCK)


def begin(ledger: Loads, one: Any) -> None:
    lookup = RequestLookup(0, one.num_tokens, [], [], [])
    ledger.begin(one, lookup, [], 0, one.num_tokens)


def test_small_loads_do_not_overtake_a_large_one_for_ever() -> None:
    ledger, large = loads(), request("large", 900)
    small = [request(f"small {nth}", 100) for nth in range(50)]
    assert ledger.has_room(small[0])
    begin(ledger, small[0])
    for nth in range(1, 50):
        admitted = ledger.has_room(large)
        if admitted:
            break
        if ledger.has_room(small[nth]):
            begin(ledger, small[nth])
        ledger.ended(small[nth - 1].request_id, True)
    assert admitted


def test_a_request_that_stops_waiting_for_room_holds_up_no_other() -> None:
    ledger = loads()
    begin(ledger, request("first", 200))
    assert not ledger.has_room(request("large", 900))
    assert not ledger.has_room(request("small", 10))
    ledger.stop_waiting("small")
    assert not ledger.has_room(request("small", 10))
    ledger.stop_waiting("large")
    assert ledger.has_room(request("small", 10))
