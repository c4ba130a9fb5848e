"""What stands between the connector and vLLM: an error that the connector did not foresee is a miss, and ends nothing.

Every hook that vLLM calls passes through `hook`, and work inside a hook that must not fail together through
`Guard.part`. Each kind of error is logged once, with its traceback; all of them are counted.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from vllm.logger import init_logger

logger = init_logger("vllm.kvpool.guard")

MAX_KINDS = 256

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Part:
    """A part of a hook, named `what` in the log, whose errors end the part alone."""

    _guard: Guard
    _what: str
    failed: bool = False

    def __enter__(self) -> Part:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failed = True
        self._guard.failed(self._what, error)
        return True


class Guard:
    """Of one side of the connector. Thread-safe. `count` is called for each error."""

    def __init__(self, count: Callable[[], None] = lambda: None):
        self._count = count
        self._lock = threading.Lock()
        self._said: set[tuple[str, type[BaseException]]] = set()

    def part(self, what: str) -> Part:
        """A part named `what`. A step may have hundreds of parts, and `contextlib.contextmanager` adds 5 us to each."""
        return Part(self, what)

    def failed(self, what: str, error: BaseException) -> None:
        """Counts an unexpected error, and logs the first of its kind."""
        self._count()
        kind = what, type(error)
        with self._lock:
            if kind in self._said or len(self._said) >= MAX_KINDS:
                return
            self._said.add(kind)
        logger.error(
            "kvpool: %s failed with an unexpected error, and the engine continues without it; further errors of this "
            "kind are only counted, in vllm:kvpool_unexpected_errors",
            what,
            exc_info=error,
        )


def hook(recover: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a method, whose object or class has a `guard`, a hook that raises no Exception.

    Args:
        recover: called with the hook's arguments once it has failed: leaves nothing of the hook's work half done, and
            returns what vLLM gets instead. Must not raise.
    """

    def guarded_by(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                owner: Any = args[0]
                owner.guard.failed(method.__name__, error)
            recovered: R = recover(*args, **kwargs)
            return recovered

        return guarded

    return guarded_by
