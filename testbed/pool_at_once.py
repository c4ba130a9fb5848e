"""A pool whose calls do all of their steps at once: for callers without an event loop."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.protocol.types import BlockRun, Located, Lookup, PutGrant, PutReceipt, Quota, ShardRange
from kvpool_server.cache.leases import NOBODY, Owner
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import finish


class PoolAtOnce(Pool):
    """Each method is the pool's, or its collaborator's, of that name."""

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        finish(self.set_quotas_in_steps(quotas))

    def lookup(
        self, fingerprint: bytes, runs: Sequence[BlockRun], *, prefix_only: bool, lease_ttl_ms: int = 0
    ) -> Lookup:
        """With a TTL the lookup is one for a load: a use, and told to the observers of traffic."""
        found = finish(self.lookups.find(fingerprint, runs, prefix_only, lease_ttl_ms))
        self.lookups.record_use(found)
        if lease_ttl_ms:
            self.tell_traffic(found.namespace, runs, found.hits)
        return Lookup(found.hits, found.lease_id, found.lease_ttl_ms)

    def put_start(
        self, fingerprint: bytes, runs: Sequence[BlockRun], shards: ShardRange, ticket_ttl_ms: int = 0
    ) -> PutGrant:
        return finish(self.put_start_in_steps(fingerprint, runs, shards, ticket_ttl_ms))

    def put_end(self, ticket_id: int, checksums: Sequence[int]) -> PutReceipt:
        return finish(self.put_end_in_steps(ticket_id, checksums))

    def get(
        self, lease_id: int, fingerprint: bytes, runs: Sequence[BlockRun], shards: ShardRange, owner: Owner = NOBODY
    ) -> Located:
        return finish(self.lookups.get(lease_id, fingerprint, runs, shards, owner))

    def remove(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> int:
        return finish(self.removals.remove(fingerprint, runs))

    def clear(self, fingerprint: bytes = b"") -> int:
        return finish(self.removals.clear(fingerprint))
