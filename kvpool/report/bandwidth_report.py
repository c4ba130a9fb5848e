"""What a measurement of bandwidth found, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvpool.report.bandwidth import Bandwidth, HitCost, Rates
from kvpool.report.quotas import size_text


def row_of(measured: Bandwidth, cost: HitCost | None, prefill: float | None) -> dict[str, Any]:
    """The measurement as JSON.

    Args:
        cost: of a namespace's hit, if one was asked for.
        prefill: tokens that the engine prefills a second; None: unknown.
    """
    row = asdict(measured)
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
    sizes = (measured.region_bytes, measured.put_round_bytes, measured.get_round_bytes)
    region, put, get = map(size_text, sizes)
    lines = [
        f"round trip  {_ms(measured.round_trip_ms)}",
        f"one block   {_ms(measured.one_block_ms)} to look up and load {region}",
        f"put         {_rates_text(measured.put_gb_per_s)}, {measured.rounds} rounds of {put}",
        f"get         {_rates_text(measured.get_gb_per_s)}, {measured.rounds} rounds of {get}",
    ]
    if measured.transport == "shm":
        lines.append("CPU threads copy here; an engine on a GPU lets the device copy, faster.")
    if measured.limited_by == "time":
        lines.append("The pool is slow from here: rounds were made small enough for about a second.")
    if measured.limited_by == "room":
        lines.append(f"Rounds were made small: the pool has only {size_text(measured.free_bytes)} free.")
    if measured.evicted_blocks:
        lines.append(f"The pool evicted {measured.evicted_blocks:,} blocks meanwhile, for this or for engines.")
    if cost is not None:
        hit = f"A hit of {cost.num_tokens:,} tokens of {cost.fingerprint.hex()[:12]}"
        lines.append(f"{hit} loads {size_text(cost.nbytes)} a rank in {_ms(cost.load_s * 1e3)}.")
        lines.append(f"It pays where prefill is slower than {cost.break_even:,.0f} tokens/s.")
        if prefill is not None:
            compute_s = cost.num_tokens / prefill
            verb = "saves" if compute_s > cost.load_s else "loses"
            difference = _ms(abs(compute_s - cost.load_s) * 1e3)
            computing = f"At {prefill:,.0f} tokens/s computing takes {_ms(compute_s * 1e3)}"
            lines.append(f"{computing}: the hit {verb} {difference}.")
    return "\n".join(lines)


def _rates_text(rates: Rates) -> str:
    return f"{rates.median:.3g} GB/s ({rates.lowest:.3g} to {rates.highest:.3g})"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.3g} ms"
