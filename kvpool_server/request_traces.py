"""What engines have told of their requests, for `kvpool explain --request`: the last ones of each engine.

A request is kept as bytes, which are decoded when somebody asks: a message would keep the whole report in memory with
which it came. Malformed requests are dropped when they arrive. Belongs to the pool's event loop.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvpool.errors import InvalidRequestError
from kvpool.explanation import MAX_TRACES
from kvpool.explanation_messages import MAX_SECONDS, decode_trace
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
    request_id: str  # Printable.
    encoded: bytes


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
        """Keeps what an engine tells of its requests, as far as it is well-formed."""
        if not traces:
            return
        known = self._engines.pop((tenant, reporter), None) or _Engine(printable(engine[:128]), printable(model[:200]))
        self._engines[tenant, reporter] = known
        now, before = self._clock(), len(known.traces)
        known.traces.extend(_well_formed(traces[-MAX_OF_ENGINE:], now))
        self._num_of_tenant[tenant] += len(known.traces) - before
        while len(self) > MAX_TRACES_KEPT:
            self._forget(len(self) - MAX_TRACES_KEPT)
        if not known.traces:
            self._engines.pop((tenant, reporter), None)
        if not self._num_of_tenant[tenant]:
            del self._num_of_tenant[tenant]

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
        """The requests whose id begins with `request_id` and of which the caller may know, the last to arrive first.

        Of too many, the last ones of each tenant in turn. Engines say how old a request is, so the age orders nothing.

        Raises InvalidRequestError if `request_id` is no id.
        """
        if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
            raise InvalidRequestError(
                f"a request id of {len(request_id)} characters; give 1 to {MAX_REQUEST_ID_CHARS}, as vLLM logs it"
            )
        of_tenant: defaultdict[str, list[tuple[_Told, _Engine]]] = defaultdict(list)
        visible = [(tenant, engine) for (tenant, _), engine in self._engines.items() if is_visible(tenant)]
        yield
        for tenant, engine in visible:
            found = of_tenant[tenant]
            for part in _parts(list(engine.traces)):
                found += [(told, engine) for told in part if told.request_id.startswith(request_id)]
                yield
            of_tenant[tenant] = sorted(found, key=_arrival)[-MAX_TRACES:]
        in_turn = [
            pair
            for nth_of_each in itertools.zip_longest(*(reversed(found) for found in of_tenant.values()))
            for pair in nth_of_each
            if pair is not None
        ]
        shown = sorted(in_turn[MAX_TRACES - 1 :: -1], key=_arrival)
        now = self._clock()
        return tuple(_decoded(told, engine, now) for told, engine in reversed(shown))


def _well_formed(traces: Iterable[pb.RequestTrace], now: float) -> Iterator[_Told]:
    for each in traces:
        if each.ByteSize() > MAX_TRACE_BYTES:
            continue
        try:
            request_id = printable(decode_trace(each).request_id)
        except InvalidRequestError:
            continue
        if request_id:
            yield _Told(now, request_id, each.SerializeToString())


def _arrival(pair: tuple[_Told, _Engine]) -> float:
    return pair[0].at


def _parts(traces: list[_Told]) -> Iterator[list[_Told]]:
    left = iter(traces)
    return iter(lambda: list(itertools.islice(left, TRACES_PER_STEP)), [])


def _decoded(told: _Told, engine: _Engine, now: float) -> RequestTrace:
    trace = decode_trace(pb.RequestTrace.FromString(told.encoded))
    return replace(
        trace,
        request_id=told.request_id,
        engine=engine.name,
        model=engine.model,
        age_seconds=min(MAX_SECONDS, trace.age_seconds + max(0.0, now - told.at)),
    )
