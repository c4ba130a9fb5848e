"""What an engine announces of the pool's blocks and how much of it one step does; which blocks it offers once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvpool.protocol.types import BlockRun
from tests.support.clock import FakeClock
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.values import block_hash, run_of
from tests.support.vllm_objects import full_attention, make_request, tokens
from tests.vllm_plugin.core import MakeCore
from tests.vllm_plugin.kinds import kv_cache, window
from vllm_plugin.metadata import GroupBlocks, StoreJob
from vllm_plugin.scheduler import pool_contents
from vllm_plugin.scheduler.pool_contents import FORGET_S, MAX_BLOCKS, Events, PoolContents


@pytest.fixture
def one_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_contents, "NUM_SHARDS", 1)


@pytest.fixture
def router(core: MakeCore) -> Router:
    return Router(Events(core().side.geometry.groups, enabled=True))


class Router:
    """What the events heard so far add up to."""

    def __init__(self, told: Events):
        self.told = told
        self.blocks: set[object] = set()
        self.num_removals: Counter[object] = Counter()

    def store(self, *names: object) -> None:
        run = run_of(*names)
        request = make_request("r", tokens(len(names) * BLOCK_TOKENS))
        self.told.stored(request, StoreJob(1, [GroupBlocks(0, [run], [[1] * len(names)], [0])]))

    def step(self) -> int:
        """Hears what one step announces; returns how many blocks it announces as removed."""
        removed = 0
        for event in self.told.take():
            assert not isinstance(event, AllBlocksCleared), "the engine's own blocks are in the same stream"
            if isinstance(event, BlockStored):
                self.blocks.update(event.block_hashes)
            else:
                assert isinstance(event, BlockRemoved)
                assert self.blocks.issuperset(event.block_hashes), "a block is removed that is not there"
                self.blocks.difference_update(event.block_hashes)
                self.num_removals.update(event.block_hashes)
                removed += len(event.block_hashes)
        return removed


def announced(names: Iterable[object]) -> set[object]:
    return {maybe_convert_block_hash(BlockHash(block_hash(name))) for name in names}


def test_a_namespace_that_is_left_is_announced_as_empty_a_bounded_part_a_step(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_contents, "STEP_REMOVALS", 64)
    router.store(*range(300))
    assert router.step() == 0
    router.told.all_missing()
    assert router.step() <= 64
    # What is stored again meanwhile stays, and what is missing is removed once.
    router.store(*range(100), 1000)
    router.told.missing(0, [block_hash(name) for name in (99, 200, 200, 2000)])
    for _ in range(64):  # Each of `NUM_SHARDS` counts as a block, too.
        assert router.step() <= 64
    assert router.blocks == announced([*range(99), 1000])
    assert max(router.num_removals.values()) <= 2
    # A second move removes what was stored since the first.
    router.told.all_missing()
    router.store(74)
    for _ in range(64):
        assert router.step() <= 64
    assert router.blocks == announced([74]) and router.step() == 0


@pytest.mark.usefixtures("one_shard")
def test_of_very_many_the_oldest_are_announced_as_removed(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_contents, "SHARD_BLOCKS", 2)
    names = ["first", "second", "third", "fourth"]
    for name in names[:3]:
        router.store(name)
    router.step()
    assert router.blocks == announced(names[1:3])
    router.store(names[1])  # Again: it is the newest.
    router.store(names[3])
    router.step()
    assert router.blocks == announced([names[1], names[3]])


def test_a_block_that_one_group_lacks_is_not_removed_from_another(core: MakeCore) -> None:
    """Groups with blocks of one size name them alike."""
    geometry = core(cache=kv_cache(full_attention(), window(40))).side.geometry
    told, parts = Events(geometry.groups, enabled=True), []
    for group_idx in range(2):
        run = BlockRun(group_idx, [block_hash(name) for name in range(4)])
        parts.append(GroupBlocks(group_idx, [run], [[1] * 4], [0]))
    told.stored(make_request("r", tokens(4 * BLOCK_TOKENS)), StoreJob(1, parts))
    told.take()
    told.missing(1, [block_hash(2), block_hash(9)])
    (removed,) = told.take()
    assert isinstance(removed, BlockRemoved)
    assert (set(removed.block_hashes), removed.group_idx) == (announced([2]), geometry.groups[1].members[0])
    told.all_missing()
    events = [event for _ in range(8) for event in told.take()]
    assert Counter(event.group_idx for event in events if isinstance(event, BlockRemoved)) == {0: 4, 1: 3}


# What was stored recently


class Known(PoolContents):
    def __init__(self) -> None:
        self.clock = FakeClock()
        super().__init__(Events([], enabled=False), self.clock)

    def store(self, *names: object) -> None:
        parts = [GroupBlocks(0, [run_of(*names)], [[1] * len(names)])]
        self.stored(make_request("r", [1]), StoreJob(1, parts))


def test_what_was_stored_is_known_for_a_while_until_it_is_found_missing() -> None:
    known = Known()
    known.store("a", "b", "c")
    assert not known.was_stored(block_hash("another"), 0) and not known.was_stored(block_hash("a"), 1)
    known.missing(0, [block_hash("b"), block_hash("another")])
    known.missing(1, [block_hash("c")])
    assert [known.was_stored(block_hash(name), 0) for name in "abc"] == [True, False, True]
    known.clock.advance(FORGET_S)
    assert not known.was_stored(block_hash("a"), 0)
    known.store("a")
    known.forget_all()
    assert not known.was_stored(block_hash("a"), 0)


def test_of_very_many_the_oldest_are_forgotten() -> None:
    known = Known()
    for first in range(0, 2 * MAX_BLOCKS + 1, MAX_BLOCKS // 2):
        known.store(*range(first, first + MAX_BLOCKS // 2))
    assert not known.was_stored(block_hash(0), 0)
    newest = [block_hash(MAX_BLOCKS), block_hash(2 * MAX_BLOCKS)]
    assert all(known.was_stored(name, 0) for name in newest)
    known.missing(0, newest)
    assert not any(known.was_stored(name, 0) for name in newest)
