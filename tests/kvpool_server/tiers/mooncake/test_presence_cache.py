"""What the Mooncake tier knows without asking the master."""

from __future__ import annotations

import pytest

from kvpool_server.tiers.mooncake.tier import FRESH_S, PresenceCache
from tests.support.clock import FakeClock


def test_a_block_is_believed_to_be_there_for_a_while() -> None:
    clock = FakeClock()
    cache = PresenceCache(clock)
    key = (b"ns", 0, b"a")
    assert not cache.has(key)
    cache.add(key, 100)
    clock.advance(FRESH_S - 0.1)
    assert cache.has(key)
    clock.advance(0.2)
    assert not cache.has(key)
    assert cache.num_own[b"ns"] == 1, "its age says nothing about whether the block has gone"
    cache.add(key)
    assert cache.has(key) and cache.own_bytes[b"ns"] == 100
    cache.discard([key])
    assert not cache.has(key) and not cache.num_own[b"ns"] and not cache.own_bytes[b"ns"]


def test_clear_drops_one_namespace_or_all() -> None:
    cache = PresenceCache(FakeClock())
    keys = [(b"one", 0, b"a"), (b"two", 0, b"a")]
    for key in keys:
        cache.add(key, 10)
    cache.clear(b"one")
    assert [cache.has(key) for key in keys] == [False, True]
    cache.clear()
    assert not cache.has(keys[1]) and not sum(cache.own_bytes.values())


def test_it_keeps_the_latest_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_server.tiers.mooncake.tier.MAX_BLOCKS", 3)
    cache = PresenceCache(FakeClock())
    for name in (b"a", b"b", b"c", b"a", b"d"):
        cache.add((b"ns", 0, name), 10)
    assert [cache.has((b"ns", 0, name)) for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert cache.num_own[b"ns"] == 3 and cache.own_bytes[b"ns"] == 30
