"""What engines have told of their requests, for `kvpool explain --request`: the last ones of each engine.

Kept as messages, which are decoded when somebody asks. Belongs to the pool's event loop.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvpool.errors import InvalidRequestError
from kvpool.explanation import MAX_TRACES
from kvpool.explanation_messages import decode_trace
from kvpool.holdings import printable
from kvpool.request_trace import MAX_REQUEST_ID_CHARS, RequestTrace
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.caller import is_visible
from kvpool_server.cache.steps import Steps

MAX_OF_ENGINE = 1_000
MAX_TRACES_KEPT = 16_384
"""Of all engines. The engine that has told least recently of the tenant with most loses its oldest for another."""
MAX_TRACE_BYTES = 1_024
"""Larger ones are not kept."""
TRACES_PER_STEP = 1_024


class _Told(NamedTuple):
    at: float
    message: pb.RequestTrace


@dataclass(slots=True)
class _Engine:
    name: str
    model: str
    traces: deque[_Told] = field(default_factory=lambda: deque(maxlen=MAX_OF_ENGINE))


class RequestTraces:
    """Those of one server.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._engines: OrderedDict[tuple[str, bytes], _Engine] = OrderedDict()  # The last to tell is last.
        self._num_of_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._num_of_tenant.total()

    def add(self, tenant: str, reporter: bytes, engine: str, model: str, traces: Sequence[pb.RequestTrace]) -> None:
        """Keeps what an engine tells of its requests."""
        if not traces:
            return
        known = self._engines.pop((tenant, reporter), None) or _Engine(printable(engine[:128]), printable(model[:200]))
        self._engines[tenant, reporter] = known
        now, before = self._clock(), len(known.traces)
        known.traces.extend(_Told(now, each) for each in traces[-MAX_OF_ENGINE:] if each.ByteSize() <= MAX_TRACE_BYTES)
        self._num_of_tenant[tenant] += len(known.traces) - before
        while len(self) > MAX_TRACES_KEPT:
            self._forget(len(self) - MAX_TRACES_KEPT)
        if not known.traces:
            self._engines.pop((tenant, reporter), None)

    def _forget(self, count: int) -> None:
        """Forgets up to `count` of the engine that has told least recently of the tenant with most."""
        ((most, _),) = self._num_of_tenant.most_common(1)
        key = next(key for key in self._engines if key[0] == most)
        traces = self._engines[key].traces
        forgotten = min(count, len(traces))
        for _ in range(forgotten):
            traces.popleft()
        self._num_of_tenant[most] -= forgotten
        if not traces:
            del self._engines[key]

    def find_in_steps(self, request_id: str) -> Steps[tuple[RequestTrace, ...]]:
        """The newest requests, of those that the caller may know of, whose id begins with `request_id`.

        Raises InvalidRequestError if that is no id.
        """
        if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
            raise InvalidRequestError(
                f"a request id of {len(request_id)} characters; give 1 to {MAX_REQUEST_ID_CHARS}, as vLLM logs it"
            )
        found: list[tuple[_Told, _Engine]] = []
        visible = [engine for (tenant, _), engine in self._engines.items() if is_visible(tenant)]
        yield
        for engine in visible:
            for part in _parts(list(engine.traces)):
                found += [(told, engine) for told in part if told.message.request_id.startswith(request_id)]
                yield
            found = sorted(found, key=lambda pair: pair[0].at - pair[0].message.age_seconds)[-MAX_TRACES:]
        now = self._clock()
        return tuple(_decoded(told, engine, now) for told, engine in reversed(found))


def _parts(traces: list[_Told]) -> Iterator[list[_Told]]:
    left = iter(traces)
    return iter(lambda: list(itertools.islice(left, TRACES_PER_STEP)), [])


def _decoded(told: _Told, engine: _Engine, now: float) -> RequestTrace:
    try:
        trace = decode_trace(told.message)
    except InvalidRequestError:  # The engine's own figures: they spoil the engine's own answer alone.
        trace = RequestTrace(told.message.request_id)
    return replace(
        trace,
        request_id=printable(trace.request_id),
        engine=engine.name,
        model=engine.model,
        age_seconds=trace.age_seconds + max(0.0, now - told.at),
    )
