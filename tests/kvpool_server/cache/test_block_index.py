"""The index against a dict."""

import random

import pytest

from kvpool_server.cache import entry as module
from kvpool_server.cache.entry import BlockIndex
from tests.support.entries import make_entry
from tests.support.values import block_hash

NAMES = [block_hash(nth) for nth in range(3_000)]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPLIT_AT", 16)


def test_it_holds_what_a_dict_would_hold() -> None:
    dice, index, expected = random.Random(0), BlockIndex(), {}
    for _ in range(10_000):
        name = dice.choice(NAMES)
        if name in expected:
            index.remove(name)
            del expected[name]
        else:
            expected[name] = make_entry(name)
            index.add(name, expected[name])
    assert len(index) == len(expected) > 1_000
    assert list(index.get_all(NAMES)) == [expected.get(name) for name in NAMES]
    assert [index.get(name) for name in NAMES] == [expected.get(name) for name in NAMES]
    assert sorted(map(id, index.values())) == sorted(map(id, expected.values()))
    assert [name in index for name in NAMES] == [name in expected for name in NAMES]
    parts = list(index.parts())
    assert sum(map(len, parts)) == len(index) and max(map(len, parts)) <= module.SPLIT_AT
    for name in expected:
        index.remove(name)
    assert not len(index) and not list(index.values())


def test_few_entries_keep_the_order_of_insertion() -> None:
    index = BlockIndex()
    made = [make_entry(nth) for nth in range(16)]
    for nth, entry in enumerate(made):
        index.add(NAMES[nth], entry)
    assert list(index.values()) == made
