"""The JSON that the dashboard asks for; docs/how-to/page.md describes it.

The loop only copies numbers, in steps. Whoever asks escapes names and encodes, in a thread of its own, and in parts so
small that the loop never waits for the interpreter.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.holdings import escaped
from kvpool.value import ValueReport
from kvpool.version import __version__
from kvpool_server.cache.steps import Steps
from kvpool_server.history import History, Key, Part
from kvpool_server.page.instruments import Instruments, sample
from kvpool_server.page.verdict import Finding, findings

MAX_NAME_CHARS = 200
"""Of a name that clients choose."""
MAX_ENGINES = 256
MAX_QUOTAS = 256


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Moment:
    """How a server was at a time; any thread may use it.

    Args:
        boot, at: see `History`.
        instruments: say what they said then.
        values: the sample of then.
    """

    boot: str
    at: float
    instruments: Instruments
    values: Mapping[Key, float]
    findings: tuple[Finding, ...]


def moment(instruments: Instruments, history: History) -> Steps[Moment]:
    """How the server is now. Asks each instrument once, in a step of its own."""
    said: dict[str, Any] = {}
    for field in dataclasses.fields(Instruments):
        ask = getattr(instruments, field.name)
        said[field.name] = _constant(ask()) if callable(ask) else ask
        yield
    then = Instruments(**said)
    values = yield from sample(then)
    yield
    found = findings(then, values, history, dt.datetime.now(dt.UTC))
    return Moment(history.boot, history.time(), then, values, tuple(found))


def _constant(value: Value) -> Callable[[], Value]:
    return lambda: value


def now_document(now: Moment) -> dict[str, Any]:
    """How the server is now."""
    instruments, stats = now.instruments, now.instruments.stats()
    return {
        "boot": now.boot,
        "time": round(now.at, 3),
        "version": __version__,
        "uptime_seconds": round(instruments.uptime_s(), 1),
        "health": instruments.state(),
        "worst": now.findings[0].level if now.findings else "ok",
        "findings": [dataclasses.asdict(finding) for finding in now.findings],
        "pool": {
            "arena_bytes": stats.arena_bytes, "free_bytes": stats.free_bytes,
            "prefaulted_bytes": stats.prefaulted_bytes, "entries": stats.num_entries,
            "incomplete": stats.num_incomplete, "quarantined": stats.num_quarantined,
            "leases": stats.num_leases, "tickets": stats.num_tickets,
        },
        "counters": stats.counters,
        "tiers": [
            {
                "tier": _name(tier.name), "up": tier.up, "size_bytes": tier.size_bytes, "used_bytes": tier.used_bytes,
                "entries": tier.num_entries, "counters": tier.counters,
            }
            for tier in stats.tiers
        ],
        "loop_lag_max_seconds": instruments.loop_lag().longest,
        "owners": _owners(instruments),
        "engines": [
            {
                "engine": _name(engine.engine), "version": _name(engine.version),
                "vllm_version": _name(engine.vllm_version), "transport": _name(engine.transport),
                "breaker_open": engine.breaker_open, "age_seconds": round(engine.age_seconds, 1),
                "model": _name(engine.model), "tenant": _name(engine.tenant),
            }
            for engine in instruments.engines()[:MAX_ENGINES]
        ],
        "quotas": [
            {"subject": _name(quota.subject), "limit_bytes": quota.limit_bytes, "used_bytes": quota.used_bytes}
            for quota in instruments.quotas()[:MAX_QUOTAS]
        ],
        "certificates": {name: ends_at.timestamp() for name, ends_at in instruments.ends().items()},
        "log": [
            {"time": round(event.at, 3), "level": event.level, "text": event.text, "fields": dict(event.fields),
             "count": event.count}
            for event in instruments.events.latest()
        ],
        "sample": [{"key": list(key), "value": _number(value)} for key, value in now.values.items()],
    }  # fmt: skip


def _owners(instruments: Instruments) -> list[dict[str, Any]]:
    """By model and tenant: what the pool has counted, and what engines have reported."""
    owners: dict[tuple[str, str], dict[str, Any]] = {}
    for usage in instruments.usage():
        owners[usage.model, usage.tenant] = {
            "model": _name(usage.model), "tenant": _name(usage.tenant), "lookup_tokens": usage.lookup_tokens,
            "hit_tokens": usage.hit_tokens, "stored_bytes": usage.stored_bytes, "loaded_bytes": usage.loaded_bytes,
            "held_bytes": usage.held_bytes, "held_blocks": usage.held_blocks,
        }  # fmt: skip
    for (model, tenant), totals in instruments.reported().items():
        owner = owners.setdefault((model, tenant), {"model": _name(model), "tenant": _name(tenant)})
        owner["reported"] = {
            "computed_tokens": dict(totals.computed_tokens), "loaded_tokens": totals.loaded_tokens,
            "saved_seconds": totals.saved_seconds, "lost_seconds": totals.lost_seconds,
            "num_requests": totals.num_requests,
        }  # fmt: skip
    return list(owners.values())


def history_document(part: Part) -> dict[str, Any]:
    """The samples of a part of a history."""
    return {
        "boot": part.boot,
        "interval_seconds": part.interval_s,
        "times": [round(at, 3) for at in part.times.tolist()],
        "series": [{"key": list(key), "values": _numbers(values)} for key, values in _politely(part.values.items())],
    }


def value_document(report: ValueReport) -> dict[str, Any]:
    """Hit ratios by arena size, of all tenants together and of each."""
    return {
        "enabled": report.enabled,
        "arena_bytes": report.arena_bytes,
        "has_tiers": report.has_tiers,
        "seconds": round(report.seconds, 1),
        "left_out": report.left_out,
        "curves": [
            {
                "tenant": _name(curve.tenant), "is_total": curve.is_total, "is_rest": curve.is_rest,
                "lookup_tokens": round(curve.lookup_tokens),
                "estimates": [
                    {
                        "size": each.size, "hit_ratio": round(each.hit_ratio, 5),
                        "hit_ratio_with_tiers": round(each.hit_ratio_with_tiers, 5),
                        "uncertainty": round(each.uncertainty, 5),
                    }
                    for each in curve.estimates
                ],
            }
            for curve in report.curves
        ],
    }  # fmt: skip


def encoded(document: dict[str, Any]) -> bytes:
    """A document as JSON, which has no NaN.

    `json.dumps` holds the interpreter until it returns, so each item of a list is encoded by itself.
    """
    return b"{" + b",".join([_dumps(name) + b":" + _encoded(value) for name, value in document.items()]) + b"}"


def _encoded(value: object) -> bytes:
    return b"[" + b",".join(map(_dumps, _politely(value))) + b"]" if isinstance(value, list) else _dumps(value)


def _politely(items: Iterable[Value]) -> Iterator[Value]:
    """Lets other threads have the interpreter before each item; unasked, a thread keeps it for 5 ms."""
    for item in items:
        time.sleep(0)
        yield item


def _dumps(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _numbers(values: npt.NDArray[np.float64]) -> list[float | int | None]:
    """The values as JSON has them: whole numbers without a fraction, null where a value lacks."""
    if bool(np.isfinite(values).all()) and bool((values == np.floor(values)).all()):
        return values.astype(np.int64).tolist()  # type: ignore[no-any-return]
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else value


def _name(text: str) -> str:
    return escaped(text, MAX_NAME_CHARS)
