"""How far the drain of a server is."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DRAIN_MS = 3_600_000
"""Longest deadline of a drain."""


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """What a server that drains still has to do.

    Args:
        num_leases, num_tickets: that clients hold.
        num_queued_blocks: that wait to be written to tiers.
        remaining_ms: until the server stops, whatever is unfinished then.
        boot_token: of the server.
    """

    num_leases: int
    num_tickets: int
    num_queued_blocks: int
    remaining_ms: int
    boot_token: int = 0
