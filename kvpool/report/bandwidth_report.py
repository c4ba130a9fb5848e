"""What a measurement of bandwidth found, for people and for programs."""

from __future__ import annotations

from typing import Any

from kvpool.report.bandwidth import Bandwidth, HitCost, Rates
from kvpool.report.quotas import size_text

GB = 1e9


def row_of(measured: Bandwidth, cost: HitCost | None, prefill: float | None) -> dict[str, Any]:
    """The measurement as JSON.

    Args:
        cost: of a namespace's hit, if one was asked for.
        prefill: tokens that the engine prefills a second; None: unknown.
    """
    row: dict[str, Any] = {
        "transport": measured.transport,
        "route": measured.route,
        "why": measured.why,
        "round_trip_ms": measured.round_trip_s * 1e3,
        "one_block_ms": measured.one_block_s * 1e3,
        "put_gb_per_s": _rates_row(measured.put),
        "get_gb_per_s": _rates_row(measured.get),
        "rounds": measured.num_rounds,
        "put_round_bytes": measured.put_bytes,
        "get_round_bytes": measured.get_bytes,
        "region_bytes": measured.region_bytes,
        "limited_by": measured.limited_by,
        "free_bytes": measured.free_bytes,
        "evicted_blocks": measured.num_evicted,
    }
    if cost is not None:
        row["hit"] = {"namespace": cost.fingerprint.hex(), "tokens": cost.num_tokens, "bytes": cost.nbytes}
        row["hit"]["load_ms"] = cost.load_s * 1e3
        row["hit"]["pays_below_tokens_per_s"] = cost.break_even
        if prefill is not None:
            compute_s = cost.num_tokens / prefill
            row["hit"] |= {"compute_ms": compute_s * 1e3, "saved_ms": (compute_s - cost.load_s) * 1e3}
    return row


def text_of(measured: Bandwidth, cost: HitCost | None, prefill: float | None) -> str:
    """The measurement as lines of at most 80 characters; arguments as for `row_of`."""
    region = size_text(measured.region_bytes)
    lines = [
        f"round trip  {_ms(measured.round_trip_s)}",
        f"one block   {_ms(measured.one_block_s)} to look up and load {region}",
        f"put         {_rates_text(measured.put)}, {_rounds(measured, measured.put_bytes)}",
        f"get         {_rates_text(measured.get)}, {_rounds(measured, measured.get_bytes)}",
    ]
    if measured.transport == "shm":
        lines.append("CPU threads copy here; an engine on a GPU lets the device copy, faster.")
    if measured.limited_by == "time":
        lines.append("The pool is slow from here: rounds were made small enough for about a second.")
    if measured.limited_by == "room":
        lines.append(f"Rounds were made small: the pool has only {size_text(measured.free_bytes)} free.")
    if measured.num_evicted:
        lines.append(f"The pool evicted {measured.num_evicted:,} blocks meanwhile, for this or for engines.")
    if cost is not None:
        hit = f"A hit of {cost.num_tokens:,} tokens of {cost.fingerprint.hex()[:12]}"
        lines.append(f"{hit} loads {size_text(cost.nbytes)} a rank in {_ms(cost.load_s)}.")
        lines.append(f"It pays where prefill is slower than {cost.break_even:,.0f} tokens/s.")
        if prefill is not None:
            compute_s = cost.num_tokens / prefill
            verb = "saves" if compute_s > cost.load_s else "loses"
            lines.append(
                f"At {prefill:,.0f} tokens/s computing takes {_ms(compute_s)}: the hit {verb} "
                f"{_ms(abs(compute_s - cost.load_s))}."
            )
    return "\n".join(lines)


def _rates_row(rates: Rates) -> dict[str, float]:
    return {"median": rates.median / GB, "lowest": rates.lowest / GB, "highest": rates.highest / GB}


def _rates_text(rates: Rates) -> str:
    return f"{rates.median / GB:.3g} GB/s ({rates.lowest / GB:.3g} to {rates.highest / GB:.3g})"


def _rounds(measured: Bandwidth, nbytes: int) -> str:
    return f"{measured.num_rounds} rounds of {size_text(nbytes)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms"
