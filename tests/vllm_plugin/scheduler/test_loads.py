from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_plugin.metadata import LoadJob
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.groups import Group
from vllm_plugin.model.hit_rules import Reach, Rule
from vllm_plugin.scheduler.loads import Loads

BLOCK = 16
GROUP = Group("full_attention", Rule(Reach.ALL, BLOCK), (0,))


def loads(num_blocks: int = 1000) -> Loads:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
    )
    specs: Any = [SimpleNamespace(groups=[SimpleNamespace(slot_bytes=1)])]
    cache: Any = SimpleNamespace(num_blocks=num_blocks)
    return Loads([GROUP], specs, config, cache, False, Recorder())


def request(name: str, num_blocks: int) -> Any:
    return SimpleNamespace(request_id=name, num_tokens=num_blocks * BLOCK)


def begin(ledger: Loads, one: Any) -> None:
    ledger.begin(one, LoadJob(one.request_id, (1,), []), 0, one.num_tokens, False)


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


def test_who_leaves_the_line_holds_up_nobody() -> None:
    ledger = loads()
    begin(ledger, request("first", 200))
    assert not ledger.has_room(request("large", 900))
    assert not ledger.has_room(request("small", 10))
    ledger.leave_line("small")
    assert not ledger.has_room(request("small", 10))
    ledger.leave_line("large")
    assert ledger.has_room(request("small", 10))
