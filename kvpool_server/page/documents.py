"""The JSON that the dashboard asks for; docs/page.md describes it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.holdings import escaped
from kvpool.version import __version__
from kvpool_server.cache.steps import finish
from kvpool_server.history import History, Part
from kvpool_server.page.instruments import Instruments, sample
from kvpool_server.page.verdict import findings

MAX_NAME_CHARS = 200
"""Of a name that clients choose."""
MAX_ENGINES = 256
MAX_QUOTAS = 256


def now_document(instruments: Instruments, history: History) -> dict[str, Any]:
    """How the server is now."""
    values = finish(sample(instruments))
    stats, at = instruments.stats(), history.time()
    found = findings(instruments, values, history, dt.datetime.now(dt.UTC))
    engines, quotas = instruments.engines(), instruments.quotas()
    return {
        "boot": history.boot,
        "time": round(at, 3),
        "version": __version__,
        "uptime_seconds": round(instruments.uptime_s(), 1),
        "health": instruments.state(),
        "worst": found[0].level if found else "ok",
        "findings": [dataclasses.asdict(finding) for finding in found],
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
        "loop_lag_max_seconds": instruments.loop_lag_max(),
        "owners": _owners(instruments),
        "engines": [
            {
                "engine": _name(engine.engine), "version": _name(engine.version),
                "vllm_version": _name(engine.vllm_version), "transport": _name(engine.transport),
                "breaker_open": engine.breaker_open, "age_seconds": round(engine.age_seconds, 1),
                "model": _name(engine.model), "tenant": _name(engine.tenant),
            }
            for engine in engines[:MAX_ENGINES]
        ],
        "quotas": [
            {"subject": _name(quota.subject), "limit_bytes": quota.limit_bytes, "used_bytes": quota.used_bytes}
            for quota in quotas[:MAX_QUOTAS]
        ],
        "certificates": {name: ends_at.timestamp() for name, ends_at in instruments.ends().items()},
        "log": [
            {"time": round(event.at, 3), "level": event.level, "text": event.text, "fields": dict(event.fields),
             "count": event.count}
            for event in instruments.events.latest()
        ],
        "sample": [{"key": list(key), "value": _number(value)} for key, value in values.items()],
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
        "series": [{"key": list(key), "values": _numbers(values)} for key, values in part.values.items()],
    }


def encoded(document: dict[str, Any]) -> bytes:
    """A document as JSON, which has no NaN."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


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
