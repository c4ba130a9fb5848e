"""A namespace that is open on a server."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.protocol import replies
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.namespace import GroupSpec, NamespaceSpec
from kvpool.protocol.types import MAX_BATCH_CHUNKS, ShardRange
from kvpool.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Namespace:
    """An open namespace, valid for one boot of the server.

    Args:
        fingerprint: its name, `HASH_BYTES`.
        transport: how its bytes travel.
        max_batch_blocks: most blocks of one request; a lookup may have more, and a get is split.
        arena_bytes: bound of every region.
    """

    spec: NamespaceSpec
    fingerprint: bytes
    boot_token: int
    transport: Transport
    max_batch_blocks: int
    arena_bytes: int = replies.MAX_ARENA_BYTES

    def max_blocks(self, shards: ShardRange) -> int:
        """Most blocks of which one put or get can move these shards."""
        return max(1, min(self.max_batch_blocks, MAX_BATCH_CHUNKS // max(1, shards.count)))

    def group(self, group_idx: int) -> GroupSpec:
        """Raises InvalidRequestError if there is no such group."""
        if not 0 <= group_idx < len(self.spec.groups):
            raise InvalidRequestError(
                f"group_idx {group_idx}: the namespace has groups 0 to {len(self.spec.groups) - 1}"
            )
        return self.spec.groups[group_idx]
