"""Bounds on what clients can ask of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.types import MAX_BATCH_CHUNKS, MAX_RUNS, BlockRun, ShardRange


@dataclass(frozen=True, slots=True)
class IdentityLimits:
    """What one identity may have at once, over all of its connections, where callers are authenticated.

    A fleet of engines that share a certificate's name is one identity.

    Args:
        leased_blocks: of all its leases; a block counts once for each lease.
        streams: of lookups; a further one ends the one that has been idle longest.
        connections: to each data worker; a further one replaces the one that has been idle longest.
    """

    leases: int = 1_000
    leased_blocks: int = 1 << 20
    tickets: int = 256
    streams: int = 64
    connections: int = 32


def default_limits(_: str) -> IdentityLimits:
    """The same for every identity."""
    return IdentityLimits()


@dataclass(frozen=True, slots=True)
class Limits:
    """What all clients together, or one request, can ask of a pool.

    Args:
        max_batch_blocks: blocks that one request names, but for lookups.
        max_batch_chunks: chunks (blocks x shards) that one put or get moves.
        max_lookup_blocks: blocks that one lookup names. The server answers a large lookup in parts.
        max_runs: runs in one request.
        max_ttl_ms: of leases and tickets; a longer TTL is cut to it.
        default_ticket_ttl_ms: where the client gives no TTL.
        grace_ms: how long the slot of an expired ticket stays in quarantine, for a late writer.
        max_leases, max_tickets: live at once. A client may have as many as are still left: so one client alone gets
            half of them, and another one always gets some.
        max_leased_blocks: of all live leases; a block counts once for each lease. Shared in the same way.
        max_namespaces: open at once; a further one is refused unless an unused one can be closed.
        max_tenant_namespaces: open at once of one tenant, where callers are authenticated.
        namespace_idle_ms: how long nobody has used a namespace that may be closed for another.
        max_spec_bytes, max_specs_bytes: of one request that the server keeps (a namespace's specification, quotas, a
            report), and of all open specifications together.
        max_quotas: in force at once, and in one request.
        max_streams: streams of lookups at once; beyond it the one that has been idle longest is ended.
        pin_share: of the arena, that each tenant may pin: 0 to 1.
    """

    max_batch_blocks: int = 8_192
    max_batch_chunks: int = MAX_BATCH_CHUNKS
    max_lookup_blocks: int = 65_536
    max_runs: int = MAX_RUNS
    max_ttl_ms: int = 120_000
    default_ticket_ttl_ms: int = 10_000
    grace_ms: int = 30_000
    max_leases: int = 65_536
    max_leased_blocks: int = 1 << 22
    max_tickets: int = 16_384
    max_namespaces: int = 1_024
    max_tenant_namespaces: int = 64
    namespace_idle_ms: int = 60_000
    max_spec_bytes: int = 64 << 10
    max_specs_bytes: int = 16 << 20
    max_quotas: int = 256
    max_streams: int = 2_048
    pin_share: float = 0.1

    def check_chunks(self, runs: Sequence[BlockRun], shards: ShardRange) -> None:
        """Raises InvalidRequestError if a put or a get moves too many chunks."""
        count, most = sum(map(len, runs)), self.max_batch_chunks
        if count * shards.count > most:
            raise InvalidRequestError(
                f"{count} blocks x {shards.count} shards; give at most {most} chunks, and split larger batches"
            )
