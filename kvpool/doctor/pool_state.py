"""Checks of a pool's own numbers. They need one snapshot, and no call: `kvpool stats` and `kvpool top` use them, too.

Counters are those since the server's start, and the findings say so.
"""

from __future__ import annotations

from kvpool.doctor.finding import Finding, error, ok, warning
from kvpool.quotas import size_text
from kvpool.types import PoolStats, TierStats

MIN_LOOKUP_BLOCKS = 1_000
"""Fewer blocks asked for say nothing about the hits to come."""
SLOW_LAG_S = 0.1
DROPPED_SHARE = 0.05
"""Of blocks on their way to a tier: the tier is too slow if it drops more."""


def pool_state(stats: PoolStats) -> list[Finding]:
    """What a snapshot says about the pool, its tiers and the server."""
    findings = [*_corruption(stats), *_room(stats), *_clients(stats), *_events(stats), *_loop(stats), *_hits(stats)]
    for tier in stats.tiers:
        findings += _tier(tier)
    return findings


def _corruption(stats: PoolStats) -> list[Finding]:
    if count := stats.counters.get("corrupt_blocks", 0):
        return [
            error(
                "corruption",
                f"{_blocks(count)} in the arena had changed bytes since the server's start, and the pool dropped them",
                "test the host's memory, and look for the cause in the server's log",
            )
        ]
    return [ok("corruption", "no block in the arena has changed")]


def _room(stats: PoolStats) -> list[Finding]:
    findings = []
    if 0 < stats.prefaulted_bytes < stats.arena_bytes:
        findings.append(
            warning(
                "memory",
                f"{size_text(stats.prefaulted_bytes)} of the arena's {size_text(stats.arena_bytes)} are backed by "
                "memory so far",
                "wait; the server backs its arena in the background after the start",
            )
        )
    if count := stats.counters.get("out_of_space_puts", 0):
        findings.append(
            warning(
                "memory",
                f"{count:,} puts were refused since the server's start, because nothing in the arena could be evicted",
                "give the server more --memory: leases and puts under way fill it",
            )
        )
    if count := stats.counters.get("over_quota_puts", 0):
        findings.append(
            warning(
                "quotas",
                f"{count:,} puts were refused since the server's start, because of a quota",
                "look at `kvpool quota`, and raise the quota that is full",
            )
        )
    if stats.num_incomplete and not stats.num_tickets:
        findings.append(
            warning(
                "incomplete blocks",
                f"{_blocks(stats.num_incomplete)} miss a shard, and no put is under way",
                "look for a rank that cannot store in the engines' logs",
            )
        )
    used = stats.arena_bytes - stats.free_bytes
    return findings or [ok("memory", f"{size_text(used)} of {size_text(stats.arena_bytes)} are used")]


def _clients(stats: PoolStats) -> list[Finding]:
    findings = []
    for name, text, fix in (
        (
            "expired_leases",
            "leases expired since the server's start before their loads ended",
            "look for engines that died or stalled, or raise lease_ttl_ms of engines on slow networks",
        ),
        (
            "expired_tickets",
            "puts expired since the server's start before they ended",
            "look for engines that died or stalled, or raise ticket_ttl_ms of engines on slow networks",
        ),
        (
            "refused_leases",
            "lookups got no lease since the server's start, because too many were live",
            "use fewer engines at one server, or find the client that does not release its leases",
        ),
    ):
        if count := stats.counters.get(name, 0):
            findings.append(warning("clients", f"{count:,} {text}", fix))
    return findings


def _events(stats: PoolStats) -> list[Finding]:
    if count := stats.counters.get("dropped_kv_event_batches", 0):
        return [
            warning(
                "KV events",
                f"{count:,} batches of KV events were dropped since the server's start",
                "raise --kv-events-buffer, or look for a subscriber that does not read",
            )
        ]
    return []


def _loop(stats: PoolStats) -> list[Finding]:
    if stats.server is None:
        return []
    longest_s = stats.server.loop_lag_max_seconds
    if longest_s > SLOW_LAG_S:
        return [
            warning(
                "loop lag",
                f"the server's event loop was up to {longest_s * 1e3:,.0f} ms late in the last minute",
                "give the server a core of its own; engines that compute on all cores take it away",
            )
        ]
    return [ok("loop lag", f"the server's event loop was at most {longest_s * 1e3:.1f} ms late in the last minute")]


def _hits(stats: PoolStats) -> list[Finding]:
    asked, found = tokens(stats)
    blocks = stats.counters.get("lookup_blocks", 0)
    if not blocks:
        return [ok("hits", "no engine has looked anything up yet")]
    if not stats.counters.get("lookup_hits", 0) and blocks >= MIN_LOOKUP_BLOCKS:
        return [
            warning(
                "hits",
                f"lookups have asked for {blocks:,} blocks, and found none",
                "compare the engines' namespaces: `kvpool doctor` names a field in which they differ",
            )
        ]
    return [ok("hits", f"lookups found {found:,} of {asked:,} tokens")] if asked else []


def tokens(stats: PoolStats) -> tuple[int, int]:
    """Tokens that lookups asked for, and those that they found, since the server's start."""
    usage = stats.server.usage if stats.server is not None else ()
    return sum(each.lookup_tokens for each in usage), sum(each.hit_tokens for each in usage)


def _tier(tier: TierStats) -> list[Finding]:
    check, counters = f"tier {tier.name}", tier.counters
    if not tier.up:
        return [
            error(
                check,
                "the tier failed, and the server does not call it for a while",
                "look for the cause in the server's log: a full or unmounted disk, or a store that cannot be reached",
            )
        ]
    findings = []
    dropped, demoted = counters.get("dropped_demotions", 0), counters.get("demoted_blocks", 0)
    if dropped > DROPPED_SHARE * (dropped + demoted):
        findings.append(
            warning(
                check,
                f"{_blocks(dropped)} of {dropped + demoted:,} were not written to the tier since the server's start",
                "the tier is too slow for what engines store: take a faster disk, or more threads=",
            )
        )
    if count := counters.get("refused_blocks", 0):
        findings.append(warning(check, f"the tier had no room for {_blocks(count)}", "give the tier a larger size="))
    if count := counters.get("corrupt_blocks", 0):
        findings.append(
            warning(check, f"{_blocks(count)} in the tier had changed bytes, and were dropped", "check the disk")
        )
    size = f" of {size_text(tier.size_bytes)}" if tier.size_bytes else ""
    return findings or [ok(check, f"the tier works; {size_text(tier.used_bytes)}{size} are used")]


def _blocks(count: int) -> str:
    return f"{count:,} block{'' if count == 1 else 's'}"
