"""Bounds on what clients can ask of a pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """See the module.

    Args:
        max_batch_blocks: blocks in one request.
        max_ttl_ms: of leases and tickets; a longer TTL is cut to it.
        default_ticket_ttl_ms: where the client gives no TTL.
        grace_ms: how long the slot of an expired ticket stays in quarantine, for a late writer.
        max_leases, max_tickets: live at once.
        max_namespaces: open at once; beyond it the least recently used one is closed.
        max_quotas: in force at once.
    """

    max_batch_blocks: int = 65_536
    max_ttl_ms: int = 120_000
    default_ticket_ttl_ms: int = 10_000
    grace_ms: int = 30_000
    max_leases: int = 100_000
    max_tickets: int = 100_000
    max_namespaces: int = 1_024
    max_quotas: int = 256
