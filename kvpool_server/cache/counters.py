"""What a pool counts, for /metrics and `kvpool stats`: each name with its HELP text.

To add a counter, name it here and count it in `pool.counters`; a name that is not here is a KeyError.
"""

from dataclasses import dataclass, field

COUNTERS = {
    "lookups": "Lookups. While a tier promotes blocks, a repeated lookup counts once, one given up not at all.",
    "lookup_blocks": "Blocks that lookups asked for.",
    "lookup_hits": "Blocks that lookups found complete. Divided by kvpool_lookup_blocks_total: the hit ratio.",
    "put_granted_blocks": "Blocks for which a put got a region to write.",
    "put_present_blocks": "Blocks that a put found present.",
    "put_busy_blocks": "Blocks that a put skipped because another put was writing them.",
    "put_completed_blocks": "Blocks that became readable.",
    "located_blocks": "Blocks of which a lookup's answer told the place, so that they are read without a get.",
    "get_blocks": "Blocks that gets asked for.",
    "get_present_blocks": "Blocks that gets found present.",
    "evicted_blocks": "Blocks evicted, including for quotas.",
    "quota_evicted_blocks": "Blocks evicted because their tenant or namespace would have exceeded its quota.",
    "pin_granted_blocks": "Blocks of pin hints that are pinned, each time that a hint names them.",
    "pin_refused_blocks": "Blocks that a pin hint left unpinned: beyond the tenant's budget, or behind such a block.",
    "pin_given_back_blocks": "Pinned blocks evicted because nothing else could be. Lower pins or raise --memory.",
    "expired_by_hint_blocks": "Blocks of expire hints, which are evicted before others.",
    "prefetch_hints": "Prefetch hints that were taken.",
    "adopted_blocks": "Blocks of the server before that a start with its memory has made readable again.",
    "removed_blocks": "Blocks removed or cleared by request.",
    "corrupt_blocks": "Blocks dropped because their bytes had changed. Alert on any.",
    "out_of_space_puts": "Puts refused because too little could be evicted in time.",
    "over_quota_puts": "Puts refused because of a quota.",
    "expired_leases": "Leases that reached their deadline: a reader died or stalled.",
    "refused_leases": "Lookups that got no lease because too many leases were live.",
    "expired_tickets": "Put tickets that reached their deadline: a writer died or stalled.",
    "revoked_tickets": "Put tickets that a client gave back after a failed write.",
    "kv_event_batches": "KV event batches (messages) published.",
    "kv_events": "KV events published.",
    "dropped_kv_event_batches": "KV event batches dropped because publishing lagged too far; subscribers see a gap.",
    "kv_event_replays": "Replay requests of KV event subscribers that joined, missed messages or checked for them.",
    "kv_event_snapshots": "Snapshots for KV event subscribers: answers to replay requests, and snapshots in streams "
    "without replays. If many are answers, raise kv_events_buffer.",
}


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A snapshot of the pool without its tiers, as `StatsResponse` in the proto."""

    arena_bytes: int
    free_bytes: int
    num_entries: int
    num_incomplete: int
    num_quarantined: int
    num_leases: int
    num_tickets: int
    pinned_bytes: int
    counters: dict[str, int] = field(default_factory=dict)
