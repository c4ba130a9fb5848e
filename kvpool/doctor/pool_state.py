"""Checks of a pool's own numbers.

What is counted is a problem while the counter grows, and only worth knowing afterwards: see `window`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvpool.doctor.window import SINCE_START, Key, Window, total
from kvpool.report.finding import Finding, Level, error, info, ok, warning
from kvpool.report.quotas import size_text
from kvpool.v1 import pool_pb2 as pb

MIN_LOOKUP_BLOCKS = 1_000
"""Fewer blocks asked for say nothing about the hits to come."""
DROPPED_SHARE = 0.05
"""Of blocks on their way to a tier: the tier is too slow if it drops more."""
INCOMPLETE = "incomplete blocks"
"""The name of a check that is right only between puts: two ranks store the shards of a block one after the other."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """A counter that does not grow while all is well.

    Args:
        text: with {count}, {blocks} and {when}.
    """

    counter: str
    check: str
    level: Level
    text: str
    fix: str


_COUNTED = (
    _Counted(
        "corrupt_blocks",
        "corruption",
        Level.ERROR,
        "{blocks} in the arena had changed bytes {when}, and the pool dropped them",
        "test the memory of the server's host and of the engines' hosts (ECC errors in the kernel's log)",
    ),
    _Counted(
        "out_of_space_puts",
        "memory",
        Level.ERROR,
        "{count} puts were refused {when}, because nothing in the arena could be evicted",
        "give the server more --memory, or look for readers that hold leases for long",
    ),
    _Counted(
        "over_quota_puts",
        "quotas",
        Level.WARNING,
        "{count} puts were refused {when}, because of a quota",
        "look at `kvpool quota`, and raise the quota that is full",
    ),
    _Counted(
        "expired_leases",
        "clients",
        Level.WARNING,
        "{count} leases expired {when} before their loads ended",
        "look for engines that died or stalled, or raise lease_ttl_ms of engines on slow networks",
    ),
    _Counted(
        "expired_tickets",
        "clients",
        Level.WARNING,
        "{count} puts expired {when} before they ended",
        "look for engines that died or stalled, or raise ticket_ttl_ms of engines on slow networks",
    ),
    _Counted(
        "refused_leases",
        "clients",
        Level.WARNING,
        "{count} lookups got no lease {when}, because too many were live",
        "find the client that does not release its leases, use fewer engines at one server, or raise its --limit",
    ),
    _Counted(
        "dropped_kv_event_batches",
        "KV events",
        Level.WARNING,
        "{count} batches of KV events were dropped {when}",
        "raise --kv-events-buffer, or look for a subscriber that does not read",
    ),
)
_COUNTED_OF_TIERS = (
    _Counted(
        "corrupt_blocks",
        "",
        Level.ERROR,
        "{blocks} in the tier had changed bytes {when}, and were dropped",
        "check the disk: without a power cut, it is failing",
    ),
    _Counted(
        "refused_blocks", "", Level.WARNING, "the tier had no room for {blocks} {when}", "give the tier a larger size="
    ),
)


def pool_state(stats: pb.StatsResponse, window: Window | None = None) -> list[Finding]:
    """What a snapshot says about the pool and its tiers.

    Args:
        window: None: it is not known which counters grow, so no counter is a problem.
    """
    findings: list[Finding] = []
    for rule in _COUNTED:
        findings += _counted(rule, rule.check, (rule.counter,), stats, window)
    if not any(finding.check == "corruption" for finding in findings):
        findings.append(ok("corruption", "no block in the arena has changed"))
    findings += [*_room(stats), *_hits(stats, window)]
    for tier in stats.tiers:
        findings += _tier(tier, stats, window)
    return findings


def _counted(rule: _Counted, check: str, key: Key, stats: pb.StatsResponse, window: Window | None) -> Iterator[Finding]:
    def text(count: int, when: str) -> str:
        return rule.text.format(count=f"{count:,}", blocks=_blocks(count), when=when)

    if window is not None and (count := window.grown(key)):
        yield Finding(check, rule.level, text(count, window.when), rule.fix)
    elif count := total(stats, key):
        over = SINCE_START if window is None else f"{SINCE_START} (none {window.when})"
        yield info(check, text(count, over), rule.fix)


def _room(stats: pb.StatsResponse) -> Iterator[Finding]:
    if 0 < stats.prefaulted_bytes < stats.arena_bytes:
        share = stats.prefaulted_bytes / stats.arena_bytes
        yield warning(
            "memory",
            f"{size_text(stats.prefaulted_bytes)} of the arena's {size_text(stats.arena_bytes)} ({share:.0%}) are "
            "backed by memory so far, and stores are slower until all are",
            "wait; the server backs its arena in the background after the start",
        )
    if stats.num_incomplete and not stats.num_tickets:
        yield warning(
            INCOMPLETE,
            f"{_blocks(stats.num_incomplete)} miss a shard, and no put is under way",
            "look for a rank that cannot store in the engines' logs",
        )
    used = stats.arena_bytes - stats.free_bytes
    yield ok("memory", f"{size_text(used)} of {size_text(stats.arena_bytes)} are used")


def _hits(stats: pb.StatsResponse, window: Window | None) -> list[Finding]:
    (asked, found), blocks = tokens(stats.server), stats.counters.get("lookup_blocks", 0)
    if not blocks:
        return [ok("hits", "no engine has looked anything up yet")]
    when = SINCE_START
    is_missing = blocks >= MIN_LOOKUP_BLOCKS and not stats.counters.get("lookup_hits", 0)
    if window is not None and not is_missing:
        blocks, when = window.grown(("lookup_blocks",)), window.when
        is_missing = blocks >= MIN_LOOKUP_BLOCKS and not window.grown(("lookup_hits",))
    if is_missing:
        return [
            warning(
                "hits",
                f"lookups asked for {blocks:,} blocks {when}, and found none",
                "if prompts repeat, compare the engines' namespaces: `kvpool doctor` names the field",
            )
        ]
    return [ok("hits", f"lookups found {found:,} of {asked:,} tokens")] if asked else []


def tokens(server: pb.ServerStats) -> tuple[int, int]:
    """Tokens that lookups asked for, and those that they found."""
    return sum(each.lookup_tokens for each in server.usage), sum(each.hit_tokens for each in server.usage)


def _tier(tier: pb.TierStats, stats: pb.StatsResponse, window: Window | None) -> list[Finding]:
    check, findings = f"tier {tier.name}", []
    if not tier.up:
        findings.append(
            error(
                check,
                "the tier failed, and the server does not call it for a while",
                "look for the cause in the server's log: a full or unmounted disk, or a store that cannot be reached",
            )
        )
    findings += _dropped(check, tier.name, stats, window) if tier.up else []
    for rule in _COUNTED_OF_TIERS:
        findings += _counted(rule, check, ("tier", tier.name, rule.counter), stats, window)
    size = f" of {size_text(tier.size_bytes)}" if tier.size_bytes else ""
    return findings or [ok(check, f"the tier works; {size_text(tier.used_bytes)}{size} are used")]


def _dropped(check: str, name: str, stats: pb.StatsResponse, window: Window | None) -> Iterator[Finding]:
    """Of a tier that is up: one that is down drops all."""
    dropped_key, demoted_key = ("tier", name, "dropped_demotions"), ("tier", name, "demoted_blocks")
    fix = "the tier is too slow for what engines store: take faster storage, more threads=, or write=back"
    if window is not None:
        dropped, demoted = window.grown(dropped_key), window.grown(demoted_key)
        if dropped > DROPPED_SHARE * (dropped + demoted):
            text = f"{_blocks(dropped)} of {dropped + demoted:,} were not written to the tier {window.when}"
            yield warning(check, text, fix)
            return
    dropped, demoted = total(stats, dropped_key), total(stats, demoted_key)
    if dropped > DROPPED_SHARE * (dropped + demoted):
        text = f"{_blocks(dropped)} of {dropped + demoted:,} were not written to the tier {SINCE_START}"
        yield info(check, text if window is None else f"{text}, but less {window.when}", fix)


def _blocks(count: int) -> str:
    return f"{count:,} block{'' if count == 1 else 's'}"
