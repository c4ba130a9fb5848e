"""Hit ratios of a trace by size in bytes, for `kvpool advise`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvpool_server.cache.eviction import DEFAULT_POLICY
from kvpool_server.replay.recording import block_shape, is_recording
from kvpool_server.replay.request import num_blocks, num_distinct
from kvpool_server.replay.trace import load
from kvpool_server.value.offline import simulate

SAMPLE = 4_096
"""Sampled blocks a size."""
PARTS = 8
"""The present size of the simulation is the distinct blocks over this: the largest size then holds all."""


@dataclass(frozen=True, slots=True)
class TraceCurve:
    """Args:
    seconds: from the first request to the last.
    hit_ratios: (bytes, share of tokens hit), ascending.
    uncertainty: how far hit ratios may be off.
    """

    seconds: float
    lookup_tokens: float
    hit_ratios: list[tuple[int, float]]
    uncertainty: float


def curve_of_trace(trace: Path, kv_bytes_per_token: int | None, block_tokens: int) -> TraceCurve:
    """Simulates sizes from a 32nd of the trace's distinct blocks to all of them.

    Args:
        kv_bytes_per_token, block_tokens: for traces that do not say; a recording does.

    Raises ValueError if the trace cannot be read, or does not say enough.
    """
    requests = load(trace)
    if not num_blocks(requests):
        raise ValueError(f"trace {trace} has no blocks that were looked up; give one with lookups")
    if is_recording(trace):
        block_tokens, block_bytes = block_shape(trace)
    elif kv_bytes_per_token is None:
        raise ValueError(f"trace {trace} does not say how large its blocks are; give --kv-bytes-per-token")
    else:
        block_bytes = block_tokens * kv_bytes_per_token
    capacity = max(1, num_distinct(requests) // PARTS)
    curve = simulate(requests, capacity, DEFAULT_POLICY, SAMPLE).curve
    ratios = [(max(1, int(each.size * capacity * block_bytes)), each.hit_ratio) for each in curve.estimates]
    seconds = requests[-1].at_s - requests[0].at_s
    return TraceCurve(seconds, float(num_blocks(requests) * block_tokens), ratios, curve.uncertainty)
