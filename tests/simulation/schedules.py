"""Schedules: what happens to two engines and their pool, event by event; how they are made, played and shortened."""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.types import BlockRun, ShardRange
from kvpool_server.cache.entry import Entry
from tests.simulation.deterministic_runtime import DeterministicRuntime
from tests.simulation.engines import EXTENT_BYTES, SHAPES, Prefixes, Setup, SimEngine, take_over
from tests.simulation.network import LIMITS, Lag, SimServer
from tests.support.integrity import check_integrity
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.values import block_hash, group_spec, namespace_spec
from tests.support.vllm_objects import tokens

Event = tuple[str | int, ...]
"""The name of a method of `World`, or, for some, of `SimEngine`, and its arguments."""
OF_ENGINES = ("preempt", "send_back", "forget", "reset")

STEP_S, TURN_S = 1e-3, 2e-5
DRAIN_ROUNDS = 800
SHRINK_S = 30.0
MAX_BLOCKS_OF_A_REQUEST = 14


@dataclass(frozen=True, slots=True)
class Schedule:
    """One history; its repr makes it again.

    Args:
        shape: of the model, a key of `SHAPES`.
        setups: of the engines.
        num_extents: of the arena.
        shares_memory: see `SimServer`.
    """

    shape: str
    setups: tuple[Setup, ...]
    num_extents: int
    shares_memory: bool
    events: tuple[Event, ...]


class World:
    """Two engines and a pool. Every public method is an event."""

    def __init__(self, schedule: Schedule, config: Any, patch: pytest.MonkeyPatch, is_loud: bool = True):
        self.runtime = DeterministicRuntime()
        self._prefixes = Prefixes(self.runtime)
        self.server = SimServer(
            self.runtime,
            EXTENT_BYTES,
            schedule.num_extents,
            self._prefixes,
            shares_memory=schedule.shares_memory,
        )
        take_over(patch, self.runtime, self.server, is_loud)
        self.server.is_lossless = is_loud  # Where errors are injected, some leases are left to expire.
        self._mix = random.Random(0)
        self._num_between = 0
        self._num_foreign = 0
        self.engines: list[SimEngine] = []
        self._prefixes.watch(lambda: self.server.memory, self.engines)
        for setup in schedule.setups:
            engine = SimEngine(config, setup, SHAPES[schedule.shape], self.runtime, self._prefixes, self._between)
            self.engines.append(engine)
        self._foreign_spec = namespace_spec(
            group_spec(chunk_bytes=2048), model="kvpool simulation", salt="kvpool simulation"
        )
        self.runtime.run_all(6)

    # Engines

    def add(self, engine: int, length: int, prefix: int, tail: int, max_tokens: int) -> None:
        """A request whose prompt shares `length` tokens with all others of its prefix."""
        prompt = [*_tokens(200, f"prefix {prefix}")[:length], *_tokens(tail, f"tail {tail}")]
        each = self._engine(engine)
        name = f"r{len(each.prompts)}"
        each.submit(name, prompt, max_tokens)

    def again(self, engine: int, which: int) -> None:
        """A request that has ended comes back under its name."""
        each = self._engine(engine)
        ended = [name for name in each.prompts if name not in each.scheduler.requests]
        if ended and not each.in_flight:
            name = ended[which % len(ended)]
            each.check_answers_of(name)
            each.submit(name, *each.prompts[name][:2])

    def step(self, engine: int, mix: int = 0) -> None:
        """A step of the engine's core; between its ranks other threads may run."""
        self._mix, self._num_between = random.Random(mix), mix % 4
        self._engine(engine).step()
        self._advance(STEP_S)

    def abort(self, engine: int, which: int) -> None:
        each = self._engine(engine)
        live = [name for name, request in each.scheduler.requests.items() if not request.is_finished()]
        if live:
            each.abort(live[which % len(live)])

    def of_engine(self, name: str, engine: int) -> None:
        """An event that befalls an engine alone."""
        getattr(self._engine(engine), name)()

    def settle(self, rounds: int) -> None:
        """All engines and threads go on for some rounds."""
        for _ in range(rounds):
            for engine in self.engines:
                if engine.scheduler.has_requests():
                    engine.step()
            self.runtime.run_all(2)
            self._advance(STEP_S)

    # Threads, messages and time

    def turn(self, which: int) -> None:
        """One thread goes on to its next wait, or one message arrives."""
        able = self.runtime.able()
        if able:
            self.runtime.run(able[which % len(able)])
            self._advance(TURN_S)

    def turn_all(self, rounds: int) -> None:
        self.runtime.run_all(rounds)
        self._advance(TURN_S)

    def advance(self, ms: int) -> None:
        self._advance(ms / 1000)

    # The server

    def away(self) -> None:
        self.server.up = False

    def back(self) -> None:
        self.server.up = True

    def restart(self) -> None:
        self.server.start()
        self.server.is_lossless = False

    def drain(self) -> None:
        """The server refuses new leases and tickets. It loses nothing that was granted."""
        self.server.drain()

    def hang(self) -> None:
        self.server.hung = True

    def go_on(self) -> None:
        self.server.hung = False

    def lose(self, which: int) -> None:
        """The next message, or its answer, is lost."""
        self.server.losses.append(("request", "answer", "")[which % 3])

    def lag(self, count: int, num_up: int, num_lost: int, retry_ms: int) -> None:
        """The next lookups see less than there is, each a block more than the one before, and hear of the rest."""
        self.server.lags += [Lag(num_up + nth, num_lost, retry_ms) for nth in range(count)]

    # The pool

    def others_stored(self, engine: int, prefix: int, length: int, gaps: int) -> None:
        """Another engine like this one has stored a prefix, but for some blocks."""
        pool, dice = self.server.pool, random.Random(gaps)
        (spec,) = self._engine(engine).connector.stages.specs
        fingerprint = pool.open_namespace(spec)[0].fingerprint
        # The engine's own weights may be newer: it moves on once its ranks have told them.
        weights = self._prefixes.weights_of(fingerprint)
        names = self._prefixes.learn(_tokens(200, f"prefix {prefix}")[:length], weights)
        for idx, group in enumerate(spec.groups):
            parent = b""
            for name in names[group.block_tokens // BLOCK_TOKENS - 1 :: group.block_tokens // BLOCK_TOKENS]:
                if dice.random() < gaps % 4 * 0.1:
                    continue
                try:
                    grant = pool.put_start(
                        fingerprint, [BlockRun(idx, [name], parent)], ShardRange(0, group.num_shards)
                    )
                except OutOfSpaceError:
                    return
                for offset in grant.offsets:
                    content = np.frombuffer(self._prefixes.expected(idx, group, name, weights), np.uint8)
                    self.server.memory[offset : offset + len(content)] = content
                    chunks = content.reshape(group.num_shards, -1)
                    pool.put_end(grant.ticket_id, [checksum(chunk) for chunk in chunks])
                parent = name

    def fill(self, count: int) -> None:
        """Another client stores blocks."""
        ticket_id = self._foreign_put(count, 1_000)
        if ticket_id:
            self.server.pool.put_end(ticket_id, [0] * count)

    def hog(self, count: int, ttl_ms: int) -> None:
        """Another client gets a ticket and never writes."""
        self._foreign_put(count, ttl_ms)

    def remove(self, which: int) -> None:
        entry = self._entry(which)
        if entry is not None:
            fingerprint = bytes.fromhex(entry.group.namespace.partition("@")[0])
            self.server.pool.remove(fingerprint, [BlockRun(entry.group.idx, [entry.block_hash])])

    def clear(self) -> None:
        self.server.pool.clear()

    def flip(self, which: int) -> None:
        """A bit changes in every third of the stored blocks."""
        for entry in list(self._entries())[which % 3 :: 3]:
            self.server.memory[entry.offset + which % entry.group.spec.slot_bytes] ^= 0x40

    def check_end(self) -> None:
        """All faults have stopped: everything comes to its end, and nothing is left."""
        self.server.up, self.server.hung = True, False
        self.server.losses.clear()
        self.server.lags.clear()
        for _ in range(DRAIN_ROUNDS):
            busy = [engine for engine in self.engines if engine.scheduler.has_requests() or engine.in_flight]
            if not busy:
                break
            for engine in busy:
                engine.step()
            self._advance(STEP_S)
            self.runtime.run_all(2)
            if not self.runtime.able():
                self._advance(0.05)
        else:
            raise AssertionError(f"requests without an end: {[engine.scheduler.requests for engine in self.engines]}")
        for engine in self.engines:
            engine.check_answers()
            engine.check_idle()
        self.runtime.run_all(8)
        pool = self.server.pool
        check_integrity(pool)
        self.runtime.check()
        if self.server.is_lossless:
            leases = pool.stats().num_leases
            assert leases == 0, f"{leases} leases were never released"
        for engine in self.engines:
            engine.shutdown()
        pool.clear()
        self._advance((LIMITS.max_ttl_ms + LIMITS.grace_ms) / 1000 + 1)
        pool.expire()
        check_integrity(pool)
        assert pool.stats().free_bytes == pool.stats().arena_bytes
        self.runtime.check()

    def counted(self) -> Counter[str]:
        """What the connectors have counted, and what else tells how far a schedule has come."""
        total: Counter[str] = Counter()
        for engine in self.engines:
            total.update({name: count for name, count in engine.stats.data.items() if isinstance(count, int | float)})
            total["rejected_drafts"] += engine.num_rejected_drafts
            total["stale_outcomes"] += engine.num_stale
            total["answered"] += len(engine.prompts) - len(engine.aborted)
            total["aborted"] += len(engine.aborted)
        total["drained_calls"] += self.server.num_drained
        total.update({name: self.server.pool.counters[name] for name in ("evicted_blocks", "out_of_space_puts")})
        return total

    # Helpers

    def _engine(self, which: int) -> SimEngine:
        return self.engines[which % len(self.engines)]

    def _between(self) -> None:
        for _ in range(self._num_between):
            self.turn(self._mix.randrange(1 << 16))

    def _advance(self, seconds: float) -> None:
        self.runtime.clock.advance(seconds)

    def _entries(self) -> Iterator[Entry]:
        for namespace in self.server.pool.open_namespaces():
            if namespace.spec.model != self._foreign_spec.model:
                yield from (entry for entry in namespace.entries() if entry.complete)

    def _entry(self, which: int) -> Entry | None:
        entries = list(self._entries())
        return entries[which % len(entries)] if entries else None

    def _foreign_put(self, count: int, ttl_ms: int) -> int:
        pool = self.server.pool
        fingerprint = pool.open_namespace(self._foreign_spec)[0].fingerprint
        names = [block_hash(f"foreign {self._num_foreign + nth}") for nth in range(count)]
        self._num_foreign += count
        try:
            return pool.put_start(fingerprint, [BlockRun(0, names)], ShardRange(0, 1), ttl_ms).ticket_id
        except OutOfSpaceError:
            return 0


def play(
    schedule: Schedule,
    config: Any,
    broken: Callable[[pytest.MonkeyPatch], None] | None = None,
    is_loud: bool = True,
) -> Counter[str]:
    """Plays a schedule to its end; a broken promise is an AssertionError.

    Args:
        broken: breaks the code under test first.
        is_loud: an error that the connector did not foresee is a broken promise.
    """
    with pytest.MonkeyPatch.context() as patch:
        if broken is not None:
            broken(patch)
        world = None
        try:
            world = World(schedule, config, patch, is_loud)
            for name, *arguments in schedule.events:
                happens = partial(world.of_engine, name) if name in OF_ENGINES else getattr(world, str(name))
                happens(*arguments)
                world.runtime.check()
            world.check_end()
            return world.counted()
        finally:
            if world is not None:
                world.runtime.end()


# How schedules are made


def make_schedule(seed: int) -> Schedule:
    """A schedule by its seed. Each has a mood of its own: which events it knows, and how often they come."""
    dice = random.Random(seed)
    shape = dice.choice(list(SHAPES))
    # One request of the longest kind must fit, or it would wait for ever: vLLM refuses to start then.
    num_blocks = 2 + len(SHAPES[shape]) * MAX_BLOCKS_OF_A_REQUEST + dice.choice([0, 8, 30])
    setups = tuple(_make_setup(dice, shape, num_blocks) for _ in range(dice.choice([1, 2, 2])))
    weights = {"add": 12, "step": 40, "turn": 40, "turn_all": 10, "settle": 2, "others_stored": 2}
    for name, weight in _RARE.items():
        if dice.random() < 0.4:
            weights[name] = weight
    if dice.random() < 0.4:
        for name in _FAULTS:
            weights.pop(name, None)
    names, chances = list(weights), list(weights.values())
    # Hits want a pool with something in it; loads that get in each other's way want requests that come together.
    kinds = ["others_stored"] * dice.randrange(4) + ["add"] * dice.randrange(5)
    kinds += dice.choices(names, chances, k=dice.choice([20, 40, 60]))
    if "lag" in weights:  # A tier is seen by lookups that find something: of engines that know the pool.
        kinds = ["settle", "advance", "settle", "others_stored", "lag", *kinds]
    events = tuple(_make_event(dice, name) for name in kinds)
    return Schedule(
        shape=shape,
        setups=setups,
        num_extents=dice.choice([4, 8, 24, 60]),
        shares_memory=dice.random() < 0.6,
        events=_with_a_drain(dice, events) if dice.random() < 0.15 else events,
    )


def _with_a_drain(dice: random.Random, events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The same events; among them the server drains, and is restarted later."""
    begins, ends = sorted(dice.randrange(len(events) + 1) for _ in range(2))
    return (*events[:begins], ("drain",), *events[begins:ends], ("restart",), *events[ends:])


_RARE = {"abort": 6, "again": 3, "preempt": 4, "send_back": 2, "forget": 8, "reset": 2, "advance": 5, "fill": 4,
         "hog": 2, "remove": 3, "clear": 1, "flip": 8, "away": 2, "back": 4, "restart": 2, "hang": 2, "go_on": 4,
         "lose": 4, "lag": 8}  # fmt: skip
_FAULTS = ("flip", "away", "back", "restart", "hang", "go_on", "lose", "remove", "clear", "reset")


def _make_setup(dice: random.Random, shape: str, num_blocks: int) -> Setup:
    return Setup(
        tp_size=dice.choice([1, 1, 2]),
        steps_ahead=dice.choice([0, 1, 1, 2]),
        late=dice.random() < 0.7,
        # vLLM keeps a state for each draft, and the toy engine does not.
        num_drafts=0 if "state" in shape else dice.choice([0, 0, 2]),
        num_blocks=num_blocks,
        max_batched_tokens=dice.choice([48, 100, 512]),
        max_pinned_fraction=dice.choice([0.05, 0.5, 1.0]),
        store_decoded=dice.random() < 0.7,
        window_interval_tokens=dice.choice([1, 64, 4096]),
        decline_slow_loads=dice.random() < 0.2,
        promotion_wait_ms=dice.choice([0, 30, 1_000]),
    )


_NUMBER = (range(1000),)
_ARGUMENTS: dict[str, tuple[Sequence[int], ...]] = {
    "add": ((16, 17, 32, 47, 48, 49, 64, 80, 96, 100, 128, 150), range(2), (0, 1, 20, 39), (1, 2, 8, 20)),
    "others_stored": (range(2), (48, 96, 150), range(1000)),
    "settle": ((1, 3, 10),),
    **dict.fromkeys(("step", "abort", "again", "turn", "remove", "flip", "lose"), _NUMBER),
    "turn_all": ((1, 1, 3),),
    "advance": ((1, 100, 300, 1_500, 5_100, 10_100),),
    "fill": ((1, 4, 16, 40),),
    "hog": ((4, 16), (500, 5_000)),
    "lag": ((1, 8, 60), range(5), (0, 0, 3), (1, 20, 400)),
}
"""What the arguments of an event are drawn from, but for the engine."""
_WITH_ENGINE = ("add", "others_stored", "step", "abort", "again", *OF_ENGINES)


def _make_event(dice: random.Random, name: str) -> Event:
    engine = dice.choice((0, 1))  # Drawn for each event: seeds keep their schedules.
    arguments = [dice.choice(choices) for choices in _ARGUMENTS.get(name, ())]
    return (name, engine, *arguments) if name in _WITH_ENGINE else (name, *arguments)


# How schedules are shortened


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """A shorter schedule that still fails: events are left out, the largest stretches first."""
    ends_at = time.monotonic() + SHRINK_S
    size = max(1, len(schedule.events) // 2)
    while time.monotonic() < ends_at:
        start, shorter = 0, False
        while start < len(schedule.events) and time.monotonic() < ends_at:
            without = replace(schedule, events=schedule.events[:start] + schedule.events[start + size :])
            if fails(without):
                schedule, shorter = without, True
            else:
                start += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2)
    return schedule


@functools.lru_cache(maxsize=1024)
def _tokens(count: int, seed: str) -> list[int]:
    return tokens(count, seed)
