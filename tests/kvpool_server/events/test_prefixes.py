"""What is published of a namespace is what a router may promise, at each moment: beside the rule written out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import InvalidRequestError
from kvpool.hashing import block_hashes
from kvpool.namespace import GroupSpec, NamespaceSpec
from kvpool.types import BlockRun
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.events import prefixes, promises
from kvpool_server.events.ledger import Change, Ledger
from kvpool_server.events.prefix_encoder import PrefixEncoder
from kvpool_server.events.prefixes import STEP_BLOCKS, PrefixView
from tests.kvpool_server.cache.test_usable import FULL, MODELS, STATE, WINDOW, written_out
from tests.support.clock import FakeClock
from tests.support.effort import effort
from tests.support.values import group_spec, namespace_spec

TOKENS = 4
"""In a block of the main group."""
PREFIXES = (40, 24)
"""Tokens of a document, and of each question about it."""


class Routed:
    """A view, and what its messages add up to for a router that indexes blocks by tokens."""

    def __init__(self, spec: NamespaceSpec):
        self.specs = {spec.fingerprint(): spec}
        self.ledger = Ledger(lambda flush: None, {"dropped_kv_event_batches": 0}, first_seq=0)
        self.deferred: list[Callable[[], None]] = []
        self.clock = FakeClock()
        self.view = PrefixView(spec.model, spec.tenant, self.ledger, self.specs.get, self.deferred.append, self.clock)
        self.encode = PrefixEncoder("pool", spec.model, full_hashes=True)
        self.blocks: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}

    def groups(self, spec: NamespaceSpec) -> list[Group]:
        self.specs[spec.fingerprint()] = spec
        return [Group(each, idx, "label", spec.fingerprint()) for idx, each in enumerate(spec.groups)]

    def read(self, most: int | None = None) -> None:
        """Applies the messages since the last call. Whatever a router could not place is an AssertionError.

        Args:
            most: turns of the loop before; None: as many as the view needs.
        """
        while self.deferred and most != 0:
            self.deferred.pop(0)()
            most = None if most is None else most - 1
        self.ledger.flush()
        for batch in self.ledger.pop_batches():
            if batch.cleared:
                self.blocks.clear()
            for change in batch.changes:
                self._apply(change)

    def _apply(self, change: Change) -> None:
        if not change.stored:
            del self.blocks[change.block_hash]
            return
        assert change.block_hash not in self.blocks
        assert not change.parent_hash or change.parent_hash in self.blocks, "a block is told before its parent"
        tokens = tuple(int.from_bytes(change.tokens[at : at + 4], "little") for at in range(0, len(change.tokens), 4))
        self.blocks[change.block_hash] = (change.parent_hash or None, tokens)

    def promised(self, tokens: list[int]) -> int:
        """Tokens of the longest run of stored blocks."""
        children = {(parent, ids): name for name, (parent, ids) in self.blocks.items()}
        at, parent = 0, None
        while True:
            size = next((len(ids) for before, ids in children if before == parent), 0)
            name = children.get((parent, tuple(tokens[at : at + size]))) if size else None
            if name is None:
                return at
            at, parent = at + size, name


def _entry(group: Group, hashes: list[bytes], nth: int) -> Entry:
    return Entry(group, hashes[nth], None, 0, 0, hashes[nth - 1] if nth else b"")


def _names(tokens: list[int], group: GroupSpec) -> list[bytes]:
    """Of a prompt's blocks: a block of several hash units is named by the last of them."""
    ratio = group.block_tokens // TOKENS
    return block_hashes(tokens, TOKENS)[ratio - 1 :: ratio]


def _promised_at_most(groups: tuple[GroupSpec, ...], held: list[set[int]], num_tokens: int) -> int:
    """The longest prefix at each boundary of which a hit could end."""
    sizes = [group.block_tokens for group in groups]
    step, promised = max(sizes), 0
    for boundary in range(step, num_tokens + 1, step):
        if written_out(groups, held, boundary) != boundary:
            break
        promised = boundary
    return promised


@pytest.fixture(params=[STEP_BLOCKS, 2], ids=["whole", "in steps"])
def step_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "STEP_BLOCKS", request.param)


@pytest.mark.usefixtures("step_blocks")
@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
def test_a_router_promises_what_every_group_has_blocks_for(groups: tuple[GroupSpec, ...]) -> None:
    chance = random.Random(3)
    spec = namespace_spec(*groups, model="m")
    routed = Routed(spec)
    pool_groups = routed.groups(spec)
    main = groups.index(FULL)
    documents = [[chance.randrange(9) for _ in range(PREFIXES[0])] for _ in range(3)]
    prompts = [doc + [chance.randrange(9) for _ in range(PREFIXES[1])] for doc in documents for _ in range(3)]
    held: list[set[bytes]] = [set() for _ in groups]
    compared = promised = 0
    for _ in range(3_000):
        tokens, idx = chance.choice(prompts), chance.randrange(len(groups))
        names = _names(tokens, groups[idx])
        nth = chance.randrange(len(names))
        action = chance.random()
        if action < 0.15:
            first = chance.randrange(nth + 1)
            hashes = _names(tokens, FULL)[first : nth + 1]
            run = BlockRun(main, hashes, _names(tokens, FULL)[first - 1] if first else b"")
            if hashes:
                routed.view.announced(spec.fingerprint(), run, tokens[first * TOKENS : (first + len(hashes)) * TOKENS])
        elif action < 0.85:
            for at in range(nth + 1):
                if names[at] not in held[idx]:
                    held[idx].add(names[at])
                    routed.view.stored(_entry(pool_groups[idx], names, at))
        elif names[nth] in held[idx]:
            held[idx].discard(names[nth])
            routed.view.removed(_entry(pool_groups[idx], names, nth))
        routed.read()
    run_names = {tuple(tokens): _names(tokens, FULL) for tokens in prompts}
    for tokens in prompts:
        names = run_names[tuple(tokens)]
        routed.view.announced(spec.fingerprint(), BlockRun(main, names), tokens[: len(names) * TOKENS])
    routed.read()
    for _ in range(300):
        tokens = chance.choice(prompts)[: chance.randrange(70)]
        if chance.random() < 0.3 and tokens:
            tokens = [*tokens[:-1], 9]
        indices = [
            {nth for nth, name in enumerate(_names(tokens, group)) if name in held[idx]}
            for idx, group in enumerate(groups)
        ]
        expected = _promised_at_most(groups, indices, len(tokens))
        assert routed.promised(tokens) == expected <= written_out(groups, indices, len(tokens))
        compared, promised = compared + 1, promised + bool(expected)
    assert promised > 20, f"of {compared} prompts only {promised} are promised anything: the test shows nothing"


# Of a step: which prompt, which group, how far into the prompt, what happens, and the turns of the loop then.
STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 3),
        st.integers(0, 5),
        st.sampled_from(["put", "remove", "come and go", "announce", "announce wrongly"]),
        st.integers(0, 2),
    ),
    max_size=40,
)


@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
@settings(max_examples=effort(60))
@given(steps=STEPS)
def test_what_changes_while_judging_is_behind_is_promised_as_it_is_at_the_end(
    groups: tuple[GroupSpec, ...], steps: list[tuple[int, int, int, str, int]]
) -> None:
    """At each moment a prompt may be promised too much or too little, and at rest none is."""
    spec = namespace_spec(*groups, model="m")
    routed = Routed(spec)
    pool_groups, main = routed.groups(spec), groups.index(FULL)
    prompts = [[*range(12), *([nth] * 12)] for nth in range(2)]
    held: list[set[bytes]] = [set() for _ in groups]
    routed.view.stored(_entry(pool_groups[main], _names([9] * TOKENS, FULL), 0))

    def announce(tokens: list[int], first: int = 0, offset: int = 0) -> None:
        names = _names(tokens, FULL)
        run = BlockRun(main, names[first:], names[first - 1] if first else b"")
        routed.view.announced(spec.fingerprint(), run, [token + offset for token in tokens[first * TOKENS :]])

    def put(idx: int, names: list[bytes], at: int) -> None:
        if names[at] not in held[idx]:
            held[idx].add(names[at])
            routed.view.stored(_entry(pool_groups[idx], names, at))

    def remove(idx: int, names: list[bytes], at: int) -> None:
        if names[at] in held[idx]:
            held[idx].discard(names[at])
            routed.view.removed(_entry(pool_groups[idx], names, at))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "STEP_BLOCKS", 1)
        for tokens in prompts:
            for idx, group in enumerate(groups):
                names = _names(tokens, group)
                for at in range(len(names)):
                    put(idx, names, at)
            announce(tokens)
        routed.read()
        for which, group_idx, nth, action, turns in steps:
            idx = group_idx % len(groups)
            names = _names(prompts[which], groups[idx])
            at = nth % len(names)
            if action == "put":
                put(idx, names, at)
            elif action == "remove":
                remove(idx, names, at)
            elif action == "come and go":
                remove(idx, names, at)
                routed.read(turns)
                put(idx, names, at)
                turns = 0
            else:
                announce(prompts[which], nth, offset=1 if action == "announce wrongly" else 0)
            routed.read(turns)
        for tokens in prompts:
            announce(tokens)
        routed.read()
    for tokens in prompts:
        indices = [
            {nth for nth, name in enumerate(_names(tokens, group)) if name in held[idx]}
            for idx, group in enumerate(groups)
        ]
        assert routed.promised(tokens) == _promised_at_most(groups, indices, len(tokens))


def _full(**fields: Any) -> NamespaceSpec:
    return namespace_spec(FULL, model="m", **fields)


def _store(routed: Routed, spec: NamespaceSpec, tokens: list[int]) -> list[Entry]:
    (group,) = routed.groups(spec)
    names = _names(tokens, FULL)
    entries = [_entry(group, names, nth) for nth in range(len(names))]
    for entry in entries:
        routed.view.stored(entry)
    routed.view.announced(spec.fingerprint(), BlockRun(0, names), tokens)
    return entries


def test_the_newest_namespace_of_a_model_takes_the_place_of_the_one_before() -> None:
    old, new = _full(weights_epoch="1"), _full(weights_epoch="2")
    routed = Routed(old)
    entries = _store(routed, old, list(range(8)))
    routed.read()
    assert routed.promised(list(range(8))) == 8
    _store(routed, new, [7] * 4)
    routed.read()
    assert (routed.promised(list(range(8))), routed.promised([7] * 4)) == (0, 4)
    routed.view.removed(entries[1])
    _store(routed, old, list(range(20, 24)))
    routed.read()
    assert (routed.promised(list(range(20, 24))), routed.promised([7] * 4)) == (0, 4)


def test_a_put_in_another_namespace_leaves_the_stream_as_it_is() -> None:
    one, other = _full(weights_epoch="1"), _full(weights_epoch="2")
    routed = Routed(one)
    _store(routed, one, list(range(8)))
    (group,) = routed.groups(other)
    routed.view.stored(_entry(group, _names([7] * 4, FULL), 0))
    _store(routed, one, list(range(20, 24)))
    routed.read()
    assert (routed.promised(list(range(8))), routed.promised(list(range(20, 24)))) == (8, 4)


def test_a_namespace_takes_the_stream_back_from_one_that_has_fallen_silent() -> None:
    one, visitor = _full(weights_epoch="1"), _full(weights_epoch="2")
    routed = Routed(one)
    entries = _store(routed, one, list(range(8)))
    _store(routed, visitor, [7] * 4)
    routed.view.removed(entries[1])
    routed.clock.advance(prefixes.SILENT_S - 1)
    _store(routed, one, list(range(20, 24)))
    routed.read()
    assert (routed.promised(list(range(8))), routed.promised([7] * 4)) == (0, 4)
    routed.clock.advance(1)
    _store(routed, one, list(range(30, 34)))
    routed.read()
    asked = (list(range(8)), list(range(20, 24)), list(range(30, 34)), [7] * 4)
    assert [routed.promised(tokens) for tokens in asked] == [4, 4, 4, 0]
    _store(routed, visitor, [8] * 4)
    routed.read()
    assert routed.promised([8] * 4) == 0, "it is new no more"


def test_a_namespace_takes_the_stream_back_from_one_that_has_nothing_left() -> None:
    one, visitor = _full(weights_epoch="1"), _full(weights_epoch="2")
    routed = Routed(one)
    _store(routed, one, list(range(8)))
    for entry in _store(routed, visitor, [7] * 8)[::-1]:
        routed.view.removed(entry)
    routed.view.announced(one.fingerprint(), BlockRun(0, _names(list(range(8)), FULL)), list(range(8)))
    routed.read()
    assert routed.promised(list(range(8))) == 8


def test_of_many_namespaces_the_published_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MAX_NAMESPACES", 3)
    monkeypatch.setattr(prefixes, "MAX_PASSED", 3)
    one = _full()
    routed = Routed(one)
    _store(routed, one, list(range(8)))
    for nth in range(9):
        for spec in (_full(weights_epoch=str(nth)), _full(weights_epoch=str(nth), tenant="acme")):
            (group,) = routed.groups(spec)
            routed.view.stored(_entry(group, _names([7] * 4, FULL), 0))
    _store(routed, one, list(range(20, 24)))
    routed.read()
    assert (routed.promised(list(range(8))), routed.promised(list(range(20, 24)))) == (8, 4)
    assert len(routed.view._followed) == 3 and len(routed.view._passed) == 3


def test_a_namespace_that_was_not_followed_for_a_while_is_not_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MAX_NAMESPACES", 2)
    old, new = _full(weights_epoch="1"), _full(weights_epoch="2")
    routed = Routed(old)
    _store(routed, old, [7] * 4)
    _store(routed, new, list(range(8)))
    (group,) = routed.groups(_full(weights_epoch="3"))
    routed.view.stored(_entry(group, _names([6] * 4, FULL), 0))  # The old one is not followed any more.
    _store(routed, old, [8] * 4)
    routed.read()
    assert (routed.promised(list(range(8))), routed.promised([8] * 4)) == (8, 0)
    routed.clock.advance(prefixes.SILENT_S)
    _store(routed, old, [9] * 4)
    routed.read()
    assert (routed.promised(list(range(8))), routed.promised([8] * 4), routed.promised([9] * 4)) == (0, 4, 4)


def test_the_namespaces_that_are_not_new_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MAX_BEGUN", 3)
    routed = Routed(_full())
    for nth in range(9):
        _store(routed, _full(weights_epoch=str(nth)), [nth] * 4)
    assert len(routed.view._begun) == 3


def test_the_last_announcement_of_a_block_counts() -> None:
    spec = _full()
    routed = Routed(spec)
    wrong, right = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3], [1, 1, 1, 1, 4, 4, 4, 4, 3, 3, 3, 3]
    entries = _store(routed, spec, wrong)
    routed.read()
    assert routed.promised(wrong) == 12
    names = [entry.block_hash for entry in entries]
    routed.view.announced(spec.fingerprint(), BlockRun(0, names), right)
    routed.read()
    assert (routed.promised(right), routed.promised(wrong)) == (12, 4)
    routed.view.announced(spec.fingerprint(), BlockRun(0, names[1:2]), right[4:8])  # Another beginning.
    routed.read()
    assert (routed.promised(right), routed.promised(right[4:])) == (4, 8)


@pytest.mark.parametrize(
    "spec",
    [
        namespace_spec(FULL, model="other"),
        _full(tenant="acme"),
        _full(num_pipeline_stages=2),
        _full(extra=(("name_key", "1f"),)),
        namespace_spec(STATE, WINDOW, model="m"),
        namespace_spec(group_spec(block_tokens=prefixes.MAX_BLOCK_TOKENS + 1), model="m"),
        namespace_spec(FULL, group_spec(kind="sliding_window", block_tokens=6, window_tokens=9), model="m"),
        namespace_spec(
            FULL,
            group_spec(kind="sliding_window", block_tokens=4, window_tokens=4 * prefixes.MAX_HIT_BLOCKS + 2),
            model="m",
        ),
        namespace_spec(FULL, group_spec(kind="mamba", block_tokens=2 * prefixes.MAX_ALIGNMENT), model="m"),
    ],
    ids=[
        "model",
        "tenant",
        "stages",
        "hidden names",
        "no whole prefixes",
        "large blocks",
        "blocks that do not meet",
        "a large window",
        "large common blocks",
    ],
)
def test_other_namespaces_are_not_followed(spec: NamespaceSpec) -> None:
    routed = Routed(_full())
    assert not routed.view.follows(spec)
    group = routed.groups(spec)[0]
    routed.view.stored(_entry(group, _names([1] * 8, FULL), 0))
    routed.view.announced(spec.fingerprint(), BlockRun(0, _names([1] * 8, FULL)[:1]), [1] * 4)
    routed.read()
    assert not routed.blocks


def test_the_tokens_of_a_block_that_comes_back_are_remembered() -> None:
    spec = _full()
    routed = Routed(spec)
    entries = _store(routed, spec, list(range(8)))
    routed.view.removed(entries[1])
    routed.read()
    assert routed.promised(list(range(8))) == 4
    routed.view.stored(entries[1])
    routed.read()
    assert routed.promised(list(range(8))) == 8


def test_a_long_prefix_is_withdrawn_in_steps() -> None:
    spec = _full()
    routed = Routed(spec)
    tokens = list(range(4 * 3 * STEP_BLOCKS))
    entries = _store(routed, spec, tokens)
    routed.read()
    assert len(routed.blocks) == 3 * STEP_BLOCKS
    routed.view.removed(entries[0])
    routed.ledger.flush()
    assert sum(len(batch.changes) for batch in routed.ledger.pop_batches()) == STEP_BLOCKS
    routed.view.stored(entries[0])  # Waits until all behind it are withdrawn.
    routed.blocks.clear()
    removed = 0
    while routed.deferred:
        routed.deferred.pop(0)()
        routed.ledger.flush()
        changes = [change for batch in routed.ledger.pop_batches() for change in batch.changes]
        assert len(changes) <= STEP_BLOCKS
        for change in changes:
            removed += not change.stored
            if change.stored:
                routed._apply(change)
    assert removed == 2 * STEP_BLOCKS
    assert len(routed.blocks) == 3 * STEP_BLOCKS


def test_blocks_that_change_again_before_they_are_judged_are_judged_once() -> None:
    """Else each change of a block that was changed twice would withdraw and publish all behind it by itself."""
    spec, steps_behind = _full(), 2
    routed = Routed(spec)
    busy = _store(routed, spec, list(range(100_000, 100_000 + 4 * 2 * STEP_BLOCKS)))
    tokens = list(range(4 * steps_behind * STEP_BLOCKS))
    names = [entry.block_hash for entry in _store(routed, spec, tokens)]
    routed.read()
    routed.view.removed(busy[0])
    assert routed.deferred
    for nth in range(20, 0, -1):
        for first in (1, 2, 3):
            tokens[4 * nth : 4 * nth + 4] = [first, nth, 0, 0]
            routed.view.announced(
                spec.fingerprint(), BlockRun(0, [names[nth]], names[nth - 1]), tokens[4 * nth : 4 * nth + 4]
            )
    num_turns = 0
    while routed.deferred:
        routed.deferred.pop(0)()
        num_turns += 1
    assert num_turns <= 1 + 2 * steps_behind + 1, "what is left of the busy prefix, and the other one twice"
    routed.read()
    assert routed.promised(tokens[:400]) == 400


def test_a_wrong_number_of_tokens_is_refused() -> None:
    spec = _full()
    routed = Routed(spec)
    _store(routed, spec, list(range(8)))
    with pytest.raises(InvalidRequestError, match="7 token_ids for 2 blocks; give 4 for each block of group 0"):
        routed.view.announced(spec.fingerprint(), BlockRun(0, _names(list(range(8)), FULL)), list(range(7)))


def test_a_chain_that_bites_its_tail_is_never_published() -> None:
    spec = _full()
    routed = Routed(spec)
    (group,) = routed.groups(spec)
    names = _names(list(range(8)), FULL)
    for nth, parent in ((0, names[1]), (1, names[0])):
        routed.view.stored(_entry(group, names, nth))
        routed.view.announced(spec.fingerprint(), BlockRun(0, [names[nth]], parent), [1] * 4)
    routed.read()
    assert not routed.blocks


@pytest.mark.usefixtures("step_blocks")
@pytest.mark.parametrize("num_between", [0, 1, 5])
def test_a_chain_that_comes_to_bite_its_tail_while_judging_is_behind_is_withdrawn(num_between: int) -> None:
    spec = _full()
    routed = Routed(spec)
    busy = _store(routed, spec, list(range(100, 100 + 4 * 2 * STEP_BLOCKS)))
    tokens = list(range(4 * (num_between + 2)))
    entries = _store(routed, spec, tokens)
    routed.read()
    assert routed.promised(tokens) == len(tokens)
    routed.view.removed(busy[0])
    assert routed.deferred
    routed.view.removed(entries[0])
    routed.view.announced(spec.fingerprint(), BlockRun(0, [entries[0].block_hash], entries[-1].block_hash), tokens[:4])
    routed.view.stored(entries[0])
    for _ in range(6 * STEP_BLOCKS):
        if not routed.deferred:
            break
        routed.deferred.pop(0)()
    assert not routed.deferred, "judging goes on though nothing changes any more"
    routed.read()
    assert not routed.blocks


def test_a_block_that_has_another_parent_before_it_is_judged_leaves_with_that_one() -> None:
    spec = _full()
    routed = Routed(spec)
    busy = _store(routed, spec, list(range(100, 100 + 4 * 2 * STEP_BLOCKS)))
    entries = _store(routed, spec, list(range(8)))
    (other, _) = _store(routed, spec, list(range(20, 28)))
    routed.read()
    routed.view.removed(busy[0])
    assert routed.deferred
    routed.view.removed(entries[1])
    moved = BlockRun(0, [entries[1].block_hash], other.block_hash)
    routed.view.announced(spec.fingerprint(), moved, list(range(4, 8)))
    routed.view.stored(entries[1])
    routed.read()
    assert routed.promised(list(range(8))) == 4
    assert routed.promised([20, 21, 22, 23, 4, 5, 6, 7]) == 8
    routed.view.removed(other)
    routed.read()
    assert entries[1].block_hash not in routed.blocks


def test_the_remembered_tokens_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "MAX_LEFT_BYTES", 2 * TOKENS * promises.TOKEN_BYTES)
    spec = _full()
    routed = Routed(spec)
    tokens = list(range(12))
    entries = _store(routed, spec, tokens)
    for entry in entries:
        routed.view.removed(entry)
    for entry in entries:
        routed.view.stored(entry)
    routed.read()
    assert not routed.blocks, "the oldest block's tokens are forgotten"
    routed.view.announced(spec.fingerprint(), BlockRun(0, [entries[0].block_hash]), tokens[:4])
    routed.read()
    assert routed.promised(tokens) == 12, "those of the other two are remembered"


class _CountedHash(bytes):
    """Counts how often any of its kind is looked up."""

    looked_up = 0

    def __hash__(self) -> int:
        _CountedHash.looked_up += 1
        return super().__hash__()


def test_a_turn_of_a_large_window_takes_no_longer_than_that_of_a_small_one() -> None:
    num_blocks, window = 1_500, 1_000
    spec = namespace_spec(
        FULL, group_spec(kind="sliding_window", block_tokens=TOKENS, window_tokens=TOKENS * window), model="m"
    )
    routed = Routed(spec)
    groups = routed.groups(spec)
    tokens = list(range(TOKENS * num_blocks))
    names: list[bytes] = [_CountedHash(name) for name in _names(tokens, FULL)]
    for group in groups:
        for nth in range(num_blocks):
            routed.view.stored(_entry(group, names, nth))
    routed.view.announced(spec.fingerprint(), BlockRun(0, names), tokens)
    routed.read()
    assert routed.promised(tokens[: TOKENS * window]) == TOKENS * window
    _CountedHash.looked_up = 0
    routed.view.removed(_entry(groups[1], names, 0))
    routed.view.stored(_entry(groups[1], names, 0))
    while routed.deferred:
        routed.deferred.pop(0)()
    assert _CountedHash.looked_up < 30 * 3 * num_blocks
