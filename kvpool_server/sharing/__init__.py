"""What callers may have of a server at once, and how they share it; `fair_slots` gives them turns.

It knows neither the pool nor the network.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.types import MAX_BATCH_CHUNKS, MAX_RUNS, BlockRun, ShardRange

SPARED_S = 1.0
"""A client that has been idle for less keeps what others wait for: its slot, or its connection to a data worker."""
RESERVE, LEAST = 4, 512
"""Of all, a fourth is left to clients of which each has a 512th or one at most: for 128 clients that come late."""


class Shares:
    """How much each client has, and `total`. A client may have as much as is left, so nobody can take all.

    Of clients that come one after another, and give nothing back, each gets half of what is left; so the last fourth is
    kept for those that have little. The client without a name is all that are not told apart, and may have everything.

    Source: A. Choudhury, E. Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet Switches, 1998.
    """

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()
        self.total = 0

    def of(self, client: str) -> int:
        return self._of[client]

    def has_room(self, client: str, count: int, most: int, most_own: float = math.inf) -> bool:
        """Whether a client may have so much more, where all may have `most`, and one with a name `most_own`."""
        own, left = self._of[client] + count, most - self.total
        if not client:
            return count <= left
        return own <= most_own and (own <= left - most // RESERVE or (count <= left and own <= max(1, most // LEAST)))

    def add(self, client: str, count: int = 1) -> None:
        """Gives a client more or, with a negative count, takes it back."""
        self.total += count
        self._of[client] += count
        if not self._of[client]:
            del self._of[client]


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
