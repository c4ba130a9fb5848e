"""What the dashboard's JSON costs the server: short steps on its loop, and an interpreter never held for long."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvpool.reports import EngineReport
from kvpool.types import Quota
from kvpool.value import ValueReport
from kvpool_server.cache.limits import Limits
from kvpool_server.cache.steps import Steps
from kvpool_server.history import MAX_POINTS, MAX_SERIES, Part
from kvpool_server.http import Request
from kvpool_server.page import documents, site
from kvpool_server.page.documents import encoded, history_document, moment, now_document
from kvpool_server.pairs import Pairs
from kvpool_server.process_memory import no_collections
from kvpool_server.reports.engines import MAX_REPORTERS, EngineReports
from kvpool_server.turns import Turns
from kvpool_server.usage import Usage
from tests.kvpool_server.cache.test_pool import Bench
from tests.kvpool_server.page.test_verdict import Watched
from tests.support.values import group_spec, namespace_spec


def no_value() -> Steps[ValueReport]:
    """What a server without `--value-sample` says of other arena sizes."""
    return ValueReport(False, 1 << 30, "density")
    yield


def _crowded() -> Watched:
    """As many engines, namespaces and quotas as there may be, with names that must be escaped."""
    watched, bench = Watched(), Bench(Limits())
    reports = EngineReports(watched.clock, Pairs(True))
    for nth in range(MAX_REPORTERS):
        report = EngineReport(nth.to_bytes(16, "big"), 1, engine="\u00a0" * 64, namespaces=(bytes(32),))
        reports.report(report, f"t{nth % 8}", "m" * 100 + "\u00ad" * 100)
    for nth in range(Limits().max_namespaces - 1):
        bench.pool.open_namespace(
            namespace_spec(group_spec(chunk_bytes=64), tenant=f"t{nth % 16}", model=f"m{nth}" + "\u00ad" * 300)
        )
    quotas = [Quota(f"tenant:{nth}" + "\u00ad" * 100, 1 << 20) for nth in range(256)]
    watched.instruments = dataclasses.replace(
        watched.instruments,
        usage=Usage(bench.pool).by_model_and_tenant,
        engines=reports.engines,
        quotas=lambda: quotas,
    )
    watched.instruments.usage()  # Makes the labels, as the sample of every 10 s does.
    return watched


def test_the_loop_takes_short_steps_and_asks_each_instrument_once() -> None:
    watched, asked = _crowded(), list[str]()

    def counted(name: str, ask: Any) -> Any:
        return lambda: (asked.append(name), ask())[1]

    given = {field.name: getattr(watched.instruments, field.name) for field in dataclasses.fields(watched.instruments)}
    instruments = dataclasses.replace(
        watched.instruments, **{name: counted(name, ask) for name, ask in given.items() if name != "events"}
    )

    def made() -> tuple[Any, float]:
        """The moment, and its longest step in seconds."""
        steps, longest_s = moment(instruments, watched.history), 0.0
        asked.clear()
        while True:
            started = time.thread_time()
            try:
                next(steps)
            except StopIteration as end:
                return end.value, max(longest_s, time.thread_time() - started)
            longest_s = max(longest_s, time.thread_time() - started)

    with no_collections():  # CPU time counts what other processes cost this one: the best of three.
        (now, longest_s), *others = (made() for _ in range(3))
    assert min(longest_s, *(seconds for _, seconds in others)) <= 0.010
    assert sorted(asked) == sorted(name for name in given if name != "events")
    document = now_document(now)
    assert len(document["engines"]) == len(document["quotas"]) == 256
    assert len(asked) == len(given) - 1, "the document asks the loop's objects again"
    assert json.loads(encoded(document)) == json.loads(json.dumps(document))


def test_a_history_is_encoded_in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {("computed_tokens", str(nth)): np.random.default_rng(nth).random(MAX_POINTS) for nth in range(MAX_SERIES)}
    document = history_document(Part("boot", 10, np.arange(MAX_POINTS) * 10.0, values))
    whole, dumps, sizes = json.dumps(document, separators=(",", ":")).encode(), json.dumps, list[int]()

    def measured(value: object, **options: Any) -> str:
        text = dumps(value, **options)
        sizes.append(len(text))
        return text

    monkeypatch.setattr(documents.json, "dumps", measured)
    assert encoded(document) == whole
    assert len(whole) > 1_000_000 and max(sizes) < 16_384


def test_one_answer_is_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that encode take turns with the loop at the interpreter."""
    loop, watched, most = asyncio.new_event_loop(), Watched(), list[int]()
    running = 0

    def slowly(document: dict[str, Any]) -> bytes:
        nonlocal running
        running += 1
        most.append(running)
        time.sleep(0.02)
        running -= 1
        return encoded(document)

    monkeypatch.setattr(site, "encoded", slowly)
    dashboard = site.Site(watched.instruments, watched.history, Turns(), loop, no_value)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    paths = ["/api/v1/history", "/api/v1/now"] * 4

    def ask(path: str) -> int:
        answer = dashboard.answer(Request(path), lambda: None)
        assert answer is not None
        return answer.status

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, paths)) == [200] * 8
    loop.call_soon_threadsafe(loop.stop)
    assert most == [1] * 8
