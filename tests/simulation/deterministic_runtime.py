"""Threads, queues, events and time under a schedule's control: one thread runs at a time, for as long as it is told to.

Real threads serve as coroutines only. A thread that would wait hands its turn back and says what it waits for; nothing
else ever changes the turn, and time moves by `clock.advance` alone. So a schedule has one outcome.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any

from tests.support.clock import FakeClock

SETTLE_TURNS = 20_000
Ready = Callable[[], bool]


def _always() -> bool:
    return True


class Ended(BaseException):
    """Ends a thread whose schedule is over."""


class Turn:
    """Something that waits for its turn: a thread between two waits, or a message under way.

    Attributes:
        ready: whether it can go on before `until`.
        until: when it goes on in any case.
    """

    def __init__(self, name: str, ready: Ready = _always, until: float = inf):
        self.name = name
        self.ready = ready
        self.until = until

    def __repr__(self) -> str:
        return self.name

    def take(self) -> bool:
        """Goes on; False if that was the end of it."""
        raise NotImplementedError


class Message(Turn):
    """A call that is made when its turn comes, once."""

    def __init__(self, name: str, deliver: Callable[[], None], ready: Ready = _always, until: float = inf):
        super().__init__(name, ready, until)
        self._deliver = deliver

    def take(self) -> bool:
        self._deliver()
        return False


class Coroutine(Turn):
    """A function on a thread of its own, which runs only between `take` and the next wait."""

    def __init__(self, name: str, run: Callable[[], None]):
        super().__init__(name)
        self.done = False
        self.killed = False
        self._run = run
        self._mine, self._others = threading.Lock(), threading.Lock()
        self._mine.acquire()
        self._others.acquire()
        self._thread: threading.Thread | None = None

    def take(self) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=self.name, daemon=True)
            self._thread.start()
        self._mine.release()
        self._others.acquire()
        return not self.done

    def give(self) -> None:
        self._others.release()
        self._mine.acquire()
        if self.killed:
            raise Ended

    def _main(self) -> None:
        self._mine.acquire()
        try:
            if not self.killed:
                self._run()
        except Ended:
            pass
        finally:
            self.done = True
            self._others.release()


class DeterministicRuntime:
    """All that waits for a turn. The test's own thread is the one that gives them.

    Attributes:
        broken: promises that were found broken on any thread; the first one counts.
    """

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.broken: list[str] = []
        self._waiting: list[Turn] = []
        self._current: Coroutine | None = None

    def add(self, turn: Turn) -> None:
        self._waiting.append(turn)

    def spawn(self, name: str, run: Callable[[], None]) -> Coroutine:
        coroutine = Coroutine(name, run)
        self._waiting.append(coroutine)
        return coroutine

    @property
    def current(self) -> Coroutine | None:
        return self._current

    def able(self) -> list[Turn]:
        """What can go on now, the one that has waited longest first."""
        now = self.clock.now
        return [turn for turn in self._waiting if turn.until <= now or turn.ready()]

    def run(self, turn: Turn) -> None:
        """Gives one turn."""
        assert self._current is None
        self._waiting.remove(turn)
        if isinstance(turn, Coroutine):
            self._current = turn
        try:
            if turn.take():
                self._waiting.append(turn)
        finally:
            self._current = None
        self.check()

    def run_all(self, rounds: int = 1) -> None:
        """Gives a turn to everything that can go on."""
        for _ in range(rounds):
            for turn in self.able():
                if turn in self._waiting:
                    self.run(turn)

    def wait(self, ready: Ready, until: float = inf) -> bool:
        """Waits until `ready` or a time; False if it was the time. The test's thread lets the others run meanwhile."""
        current = self._current
        if current is not None:
            current.ready, current.until = ready, until
            current.give()
            return ready()
        for _ in range(SETTLE_TURNS):
            if ready() or self.clock.now >= until:
                return ready()
            able = self.able()
            if able:
                self.run(able[0])
            else:
                self.clock.now = min([until, *(turn.until for turn in self._waiting)])
                assert self.clock.now < inf, f"everything waits for ever: {self._waiting}"
        raise AssertionError(f"turns without an end: {self._waiting}")

    def yields(self) -> None:
        """Lets others go first, where a thread calls it."""
        if self._current is not None:
            self.wait(_always)

    def check(self) -> None:
        assert not self.broken, self.broken[0]

    def end(self) -> None:
        """Ends every thread."""
        for turn in self._waiting:
            if isinstance(turn, Coroutine):
                turn.killed = True
                while turn.take():
                    pass
        self._waiting.clear()

    # Stand-ins for modules

    def threading(self) -> Any:
        """What `vllm_plugin` uses of the module `threading`."""
        runtime = self

        class Thread:
            def __init__(self, target: Callable[[], None], name: str, daemon: bool):
                self.name, self._target = name, target

            def start(self) -> None:
                self.coroutine = runtime.spawn(self.name, self._target)

            def join(self, timeout: float) -> None:
                runtime.join(self.coroutine, timeout)

        class Event:
            def __init__(self) -> None:
                self._set = False

            def set(self) -> None:
                self._set = True

            def clear(self) -> None:
                self._set = False

            def is_set(self) -> bool:
                return self._set

            def wait(self, timeout: float = inf) -> bool:
                return runtime.wait(self.is_set, runtime.clock.now + timeout)

        # A lock is never held while a thread waits.
        return SimpleNamespace(Thread=Thread, Event=Event, Lock=threading.Lock, current_thread=lambda: None)

    def queue(self) -> Any:
        """What `vllm_plugin` uses of the module `queue`."""
        runtime = self

        class SimpleQueue:
            def __init__(self) -> None:
                self._items: deque[Any] = deque()

            def __class_getitem__(cls, _: Any) -> type[SimpleQueue]:
                return cls

            def put(self, item: Any) -> None:
                self._items.append(item)

            def get(self) -> Any:
                runtime.wait(lambda: bool(self._items))
                return self._items.popleft()

        return SimpleNamespace(SimpleQueue=SimpleQueue)

    def time(self) -> Any:
        """What is used of the module `time`."""
        return SimpleNamespace(monotonic=self.clock, perf_counter=self.clock)

    def join(self, coroutine: Coroutine, timeout_s: float) -> None:
        """Waits for a thread's end, which must come in time."""
        if not self.wait(lambda: coroutine.done, self.clock.now + timeout_s):
            self.broken.append(f"{coroutine} did not end within {timeout_s} s")
