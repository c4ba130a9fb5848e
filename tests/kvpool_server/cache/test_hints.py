"""Pins and expiries of one pool, one test a rule. Random histories are in tests/simulation."""

import dataclasses
import itertools

import pytest

from kvpool.protocol.errors import InvalidRequestError, UnknownNamespaceError
from kvpool.protocol.types import Quota, ShardRange
from kvpool_server.cache.hints import ENDS_PER_DOUBLING, MAX_PIN_S, HintResult, PinBudget, pin_end
from kvpool_server.cache.steps import finish
from tests.kvpool_server.cache.test_pool import CHUNK, LIMITS, Bench
from tests.support.integrity import check_integrity
from tests.support.values import block_hash, group_spec, namespace_spec, run_of

SLOT = 2 * CHUNK


class HintBench(Bench):
    """A pool of 10 slots, of which a tenant may pin 4."""

    def __init__(self, pin_share: float = 0.4):
        super().__init__(dataclasses.replace(LIMITS, pin_share=pin_share))

    def pin(self, *names: object, seconds: int = 60) -> HintResult:
        found = finish(self.pool.hints.pin_in_steps(self.name, [run_of(*names)], seconds))
        check_integrity(self.pool)
        return found

    def unpin(self, *names: object) -> int:
        found = finish(self.pool.hints.unpin_in_steps(self.name, [run_of(*names)]))
        check_integrity(self.pool)
        return found.num_blocks

    def expire(self, *names: object) -> int:
        found = finish(self.pool.hints.expire_in_steps(self.name, [run_of(*names)]))
        check_integrity(self.pool)
        return found.num_blocks

    def fill(self, count: int = 10) -> None:
        """Puts of prefixes of one block, which nobody uses again."""
        for nth in range(count):
            self.store(f"{self.clock()}/{nth}")
        check_integrity(self.pool)


@pytest.fixture
def bench() -> HintBench:
    return HintBench()


# Pins


def test_the_first_blocks_are_pinned_that_the_budget_has_room_for(bench: HintBench) -> None:
    bench.store(*"abcdef")
    assert bench.pin(*"abcdef") == HintResult(4, num_refused=2)
    bench.store("x")
    assert bench.pin("x") == HintResult(0, num_refused=1)
    assert bench.pin(*"abcd", "not there", seconds=120) == HintResult(4), (
        "a pin can be prolonged without room in the budget"
    )
    assert bench.pin(*"abcd", seconds=1) == HintResult(4)
    bench.seconds(60)
    assert bench.pool.stats().pinned_bytes == bench.pool.pins.pinned_bytes(bench.name) == 4 * SLOT, (
        "a shorter pin has shortened a longer one"
    )
    assert bench.pool.pins.budgets() == [PinBudget("", 4 * SLOT, 4 * SLOT)]
    bench.fill(30)
    assert bench.present(*"abcdefx") == [*"abcd"]
    assert bench.pool.counters["pin_granted_blocks"] == 12 and bench.pool.counters["pin_refused_blocks"] == 3
    assert bench.pool.counters["pin_given_back_blocks"] == 0


def test_a_block_is_pinned_with_all_before_it_or_not_at_all(bench: HintBench) -> None:
    """Else a pin on a prefix's end would keep the whole prefix, whatever the budget."""
    bench.store(*"abc")
    assert bench.pin("c") == HintResult(0, num_refused=1)
    assert bench.pin("a", "b", seconds=10).num_blocks == 2
    assert bench.pin("c", seconds=600) == HintResult(1)
    bench.seconds(11)
    assert bench.pool.stats().pinned_bytes == 0, "the pin ends with that of the block before it"


def test_pinned_blocks_are_given_back_when_nothing_else_is_left() -> None:
    bench = HintBench(pin_share=1.0)
    bench.store(*range(10))
    assert bench.pin(*range(10)).num_blocks == 10
    bench.store("new", "newer")
    assert bench.present(*range(10)) == [*range(8)], "a put was refused, or did not take the prefix's end"
    assert bench.pool.counters["pin_given_back_blocks"] == 2
    assert bench.pool.stats().pinned_bytes == 8 * SLOT
    check_integrity(bench.pool)


def test_pins_end_where_nothing_else_branches_off(bench: HintBench) -> None:
    bench.store(*"abc")
    bench.store("x", parent="a")
    bench.pin(*"abc")
    bench.pin("a", "x")
    assert bench.unpin(*"abc") == 2
    assert bench.pool.stats().pinned_bytes == 2 * SLOT, "the other prefix lost its pin"
    assert bench.unpin("a", "x") == 1 and bench.pool.stats().pinned_bytes == SLOT
    bench.pool.remove(bench.name, [run_of("b", "c")])
    assert bench.unpin("a", "x") == 1 and bench.pool.stats().pinned_bytes == 0


def test_a_quota_evicts_the_subjects_pinned_blocks_last(bench: HintBench) -> None:
    bench.store(*"ab")
    bench.pin(*"ab")
    bench.fill(8)
    bench.pool.set_quotas([Quota(f"namespace:{bench.name.hex()}", 3 * SLOT)])
    assert bench.present("a", "b") == ["a", "b"] and bench.pool.stats().num_entries == 3
    check_integrity(bench.pool)


def test_repeated_pins_of_a_block_leave_nothing_behind(bench: HintBench) -> None:
    bench.store("a")
    for _ in range(100):
        bench.pin("a")
        bench.unpin("a")
    assert len(bench.pool.pins._ends) <= 2
    bench.seconds(100)
    assert not bench.pool.pins._ends and not bench.pool.pins._by_namespace


def test_pins_last_as_long_as_asked_and_little_longer_and_end_at_few_times() -> None:
    for seconds, now in itertools.product((*range(1, 130), 3_601, MAX_PIN_S, 10 * MAX_PIN_S), (0.0, 0.3, 123_456.7)):
        asked = min(seconds, MAX_PIN_S)
        assert now + asked <= pin_end(seconds, now) <= now + asked * (1 + 1 / ENDS_PER_DOUBLING) + 1
    ends = {pin_end(seconds, nth / 7) for nth, seconds in enumerate(range(1, MAX_PIN_S))}
    assert len(ends) <= 2 * ENDS_PER_DOUBLING * MAX_PIN_S.bit_length()


# Expiries


def test_what_other_prefixes_begin_with_does_not_expire(bench: HintBench) -> None:
    bench.store(*"ab")
    bench.store(*"cd", parent="b")
    bench.store("x", parent="b")
    assert bench.expire(*"abcd", "not there") == 2
    bench.fill(7)
    assert bench.present(*"abcdx") == [*"abx"]


def test_pinned_blocks_do_not_expire_and_a_pin_ends_an_expiry(bench: HintBench) -> None:
    bench.store(*"abc")
    bench.pin("a")
    assert bench.expire(*"abc") == 2
    bench.pin(*"abc")
    bench.fill(20)
    assert bench.present(*"abc") == [*"abc"]


def test_hints_are_for_open_namespaces_and_bounded_batches(bench: HintBench) -> None:
    hints = bench.pool.hints
    for hint in (
        lambda *args: hints.pin_in_steps(*args, 60),
        hints.unpin_in_steps,
        hints.expire_in_steps,
    ):
        with pytest.raises(UnknownNamespaceError):
            finish(hint(block_hash("none"), [run_of("a")]))
        with pytest.raises(InvalidRequestError, match="a batch of 17 blocks"):
            finish(hint(bench.name, [run_of(*range(17))]))
        with pytest.raises(InvalidRequestError, match="group_idx 2"):
            finish(hint(bench.name, [run_of("a", group_idx=2)]))


def test_extents_with_pinned_blocks_are_given_to_other_sizes_last() -> None:
    bench = HintBench()
    for name in range(10):  # One slot an extent.
        bench.store(name)
    bench.pin(0)
    spec = namespace_spec(group_spec(chunk_bytes=2 * CHUNK - 10), salt="other size")
    name = bench.pool.open_namespace(spec)[0].fingerprint
    for nth in range(5):
        grant = bench.pool.put_start(name, [run_of(f"new{nth}")], ShardRange(0, 1))
        bench.pool.put_end(grant.ticket_id, [1])
    assert bench.present(0) == [0]
    check_integrity(bench.pool)
