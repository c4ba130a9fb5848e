"""What checks find, and the one list of judgements of a server: `kvpool stats`, `top`, `doctor` and the page show it.

What is counted is a problem while the counter grows, and only worth knowing afterwards. The dashboard has samples of
the last `RECENT_S` to tell which counters grow; a command has one snapshot, or two.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kvpool.protocol.text import duration_text, escaped, size_text
from kvpool.v1 import pool_pb2 as pb

RECENT_S = 600.0
"""What was counted within this time is recent."""
LOOK_S, HITS_S = 1.0, 60.0
"""Between the two snapshots of a command, and the shortest time of which a lack of hits is told."""
MIN_LOOKUP_BLOCKS = 1_000
"""Fewer blocks asked for say nothing about the hits to come."""
DROPPED_SHARE = 0.05
"""Of blocks on their way to a tier: the tier is too slow if it drops more."""
LATE_S = (0.01, 0.1)
"""Lag of the event loop, its 99th percentile: of a warning, and of an error."""
SLOW_LAG_S = 0.1
"""The longest lag of a minute that is no warning: every call waits for a pause of the loop."""
ENDS_SOON_S = (14 * 86_400.0, 2 * 86_400.0)
"""Before a certificate's end: of a warning, and of an error."""
FULL_SHARE = 0.98
"""Of a quota whose subject has reached it."""
MAX_QUOTAS = 4
MAX_NAME_CHARS = 60
SINCE_START = "since the server's start"
INCOMPLETE = "incomplete blocks"
"""The name of a check that is right only between puts: two ranks store the shards of a block one after the other."""
_CERTIFICATES = {"server": "certificate of the server", "client_ca": "certificate of the clients' authority"}
_STEPS_MS = tuple(factor * 10.0**power for power in range(6) for factor in (1, 2, 5))
_EVICTED = ("quota_evicted_blocks",)

Key = tuple[str, ...]
"""A counter: ("expired_leases",) of the pool, ("tier", its name, "corrupt_blocks") of a tier."""


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    INFO = "info"
    """Worth knowing, and no problem now."""
    WARNING = "warning"
    """The pool works, and is slower or less useful than it could be."""
    ERROR = "error"
    """The pool, or a part of it, does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of one check: what was checked, in a few words, and sentences on what was found and on its fix."""

    level: Level
    check: str
    text: str
    fix: str


ok = functools.partial(Finding, Level.OK, fix="")
info = functools.partial(Finding, Level.INFO)
warning = functools.partial(Finding, Level.WARNING)
error = functools.partial(Finding, Level.ERROR)


def problems(findings: Iterable[Finding]) -> list[Finding]:
    """What is wrong now, errors first."""
    found = list(findings)
    return [finding for level in (Level.ERROR, Level.WARNING) for finding in found if finding.level is level]


def notes(findings: Iterable[Finding]) -> list[Finding]:
    """What is worth knowing, and no problem now."""
    return [finding for finding in findings if finding.level is Level.INFO]


_COUNTED = {
    "corrupt_blocks": error(
        "corruption",
        "{blocks} in the arena had changed bytes {when}, and the pool dropped them",
        "test the memory of the server's host and of the engines' hosts (ECC errors in the kernel's log)",
    ),
    "out_of_space_puts": error(
        "memory",
        "{count} puts were refused {when}, because nothing in the arena could be evicted",
        "give the server more --memory, or look for readers that hold leases for long",
    ),
    "over_quota_puts": warning(
        "quotas",
        "{count} puts were refused {when}, because of a quota",
        "look at `kvpool quota`, and raise the quota that is full",
    ),
    "expired_leases": warning(
        "clients",
        "{count} leases expired {when} before their loads ended",
        "look for engines that died or stalled, or raise lease_ttl_ms of engines on slow networks",
    ),
    "expired_tickets": warning(
        "clients",
        "{count} puts expired {when} before they ended",
        "look for engines that died or stalled, or raise ticket_ttl_ms of engines on slow networks",
    ),
    "refused_leases": warning(
        "clients",
        "{count} lookups got no lease {when}, because too many were live",
        "find the client that does not release its leases, use fewer engines at one server, or raise its --limit",
    ),
    "dropped_kv_event_batches": warning(
        "KV events",
        "{count} batches of KV events were dropped {when}",
        "raise --kv-events-buffer, or look for a subscriber that does not read",
    ),
}
"""Findings about the pool's counters that do not grow while all is well."""
_COUNTED_OF_TIERS = {
    "corrupt_blocks": error(
        "tier",
        "{blocks} in the tier had changed bytes {when}, and were dropped",
        "check the disk: without a power cut, it is failing",
    ),
    "refused_blocks": warning("tier", "the tier had no room for {blocks} {when}", "give the tier a larger size="),
}


@dataclass(frozen=True, slots=True)
class Window:
    """The time that ends now.

    Args:
        grown: by how much a counter grew.
        when: the time, for texts: "in the last 10 minutes".
        is_short: one prompt may be all that was looked up in it.
    """

    grown: Callable[[Key], int]
    when: str
    is_short: bool = False


UNKNOWN = Window(lambda key: 0, "", is_short=True)
"""It is not known which counters grow, so no counter is a problem."""


def window_of(now: pb.StatsResponse, before: pb.StatsResponse | None = None, seconds: float = 0.0) -> Window:
    """The time since the server's start, if it is recent, or else the `seconds` since `before`."""
    if now.server.uptime_seconds <= RECENT_S:
        return Window(lambda key: _total(now, key), SINCE_START)
    if before is None or before.boot_token != now.boot_token:
        return UNKNOWN
    when = f"in the last {duration_text(max(seconds, 1.0))}"
    return Window(lambda key: max(0, _total(now, key) - _total(before, key)), when, seconds < HITS_S)


def _total(stats: pb.StatsResponse, key: Key) -> int:
    """A counter since the server's start."""
    if len(key) == 1:
        return stats.counters.get(key[0], 0)
    return sum(tier.counters.get(key[2], 0) for tier in stats.tiers if tier.name == key[1])


def judgements(stats: pb.StatsResponse, window: Window = UNKNOWN) -> list[Finding]:
    """What a snapshot says about the pool, its tiers and quotas, the server, and the engines that report."""
    return [*_pool(stats, window), *_server(stats), *_quotas(stats, window), *_engines(stats)]


def judge_twice(snapshot: Callable[[], pb.StatsResponse]) -> tuple[pb.StatsResponse, list[Finding]]:
    """A snapshot and its judgements; of a server up for more than `RECENT_S`, by what grew in the `LOOK_S` before."""
    before = snapshot()
    if (window := window_of(before)) is not UNKNOWN:
        return before, judgements(before, window)
    time.sleep(LOOK_S)
    now = snapshot()
    return now, judgements(now, window_of(now, before, LOOK_S))


def _pool(stats: pb.StatsResponse, window: Window) -> list[Finding]:
    findings: list[Finding] = []
    for counter, template in _COUNTED.items():
        findings += _counted(template, (counter,), stats, window)
    if not any(finding.check == "corruption" for finding in findings):
        findings.append(ok("corruption", "no block in the arena has changed"))
    findings += [*_room(stats), *_hits(stats, window)]
    for tier in stats.tiers:
        findings += _tier(tier, stats, window)
    return findings


def _counted(template: Finding, key: Key, stats: pb.StatsResponse, window: Window) -> Iterator[Finding]:
    def text(count: int, when: str) -> str:
        return template.text.format(count=f"{count:,}", blocks=_blocks(count), when=when)

    if count := window.grown(key):
        yield replace(template, text=text(count, window.when))
    elif count := _total(stats, key):
        over = f"{SINCE_START} (none {window.when})" if window.when else SINCE_START
        yield info(template.check, text(count, over), template.fix)


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
        text = f"{_blocks(stats.num_incomplete)} miss a shard, and no put is under way"
        yield warning(INCOMPLETE, text, "look for a rank that cannot store in the engines' logs")
    used = stats.arena_bytes - stats.free_bytes
    yield ok("memory", f"{size_text(used)} of {size_text(stats.arena_bytes)} are used")


def _hits(stats: pb.StatsResponse, window: Window) -> list[Finding]:
    (asked, found), blocks = tokens(stats.server), stats.counters.get("lookup_blocks", 0)
    if not blocks:
        return [ok("hits", "no engine has looked anything up yet")]
    when = SINCE_START
    is_missing = blocks >= MIN_LOOKUP_BLOCKS and not stats.counters.get("lookup_hits", 0)
    if not window.is_short and not is_missing:
        blocks, when = window.grown(("lookup_blocks",)), window.when
        is_missing = blocks >= MIN_LOOKUP_BLOCKS and not window.grown(("lookup_hits",))
    if is_missing:
        fix = "if prompts repeat, compare the engines' namespaces: `kvpool doctor` names the field"
        return [warning("hits", f"lookups asked for {blocks:,} blocks {when}, and found none", fix)]
    return [ok("hits", f"lookups found {found:,} of {asked:,} tokens")] if asked else []


def tokens(server: pb.ServerStats) -> tuple[int, int]:
    """Tokens that lookups asked for, and those that they found."""
    return sum(each.lookup_tokens for each in server.usage), sum(each.hit_tokens for each in server.usage)


def _tier(tier: pb.TierStats, stats: pb.StatsResponse, window: Window) -> list[Finding]:
    check = f"tier {tier.name}"
    if tier.up:
        findings = [*_dropped(check, tier.name, stats, window)]
    else:  # It drops all.
        fix = (
            "look for the cause in the server's log: a full or unmounted disk, or a store or server that is not reached"
        )
        findings = [error(check, "the tier failed, and the server does not call it for a while", fix)]
    for server in tier.servers:
        if not server.up:
            fix = (
                f"look whether {server.name} runs, can be reached from the server's host, and takes its password or "
                "certificate; the server's log has the error"
            )
            findings.append(warning(check, f"questions to {server.name}, or reads from it, fail", fix))
    for counter, template in _COUNTED_OF_TIERS.items():
        findings += _counted(replace(template, check=check), ("tier", tier.name, counter), stats, window)
    size = f" of {size_text(tier.size_bytes)}" if tier.size_bytes else ""
    kept = f"; {size_text(tier.used_bytes)}{size} are used" if size or not tier.servers else ""
    keys = [ok(check, f"the fingerprint of its key is {server.key}") for server in tier.servers if server.key]
    return [*(findings or [ok(check, f"the tier works{kept}")]), *keys]


def _dropped(check: str, name: str, stats: pb.StatsResponse, window: Window) -> Iterator[Finding]:
    def text(count: Callable[[Key], int], when: str) -> str:
        """Empty if few blocks were dropped."""
        dropped, demoted = (count(("tier", name, counter)) for counter in ("dropped_demotions", "demoted_blocks"))
        if dropped <= DROPPED_SHARE * (dropped + demoted):
            return ""
        return f"{_blocks(dropped)} of {dropped + demoted:,} were not written to the tier {when}"

    fix = "the tier is too slow for what engines store: take faster storage, more threads=, or write=back"
    if recent := text(window.grown, window.when):
        yield warning(check, recent, fix)
    elif earlier := text(lambda key: _total(stats, key), SINCE_START):
        yield info(check, f"{earlier}, but less {window.when}" if window.when else earlier, fix)


def _blocks(count: int) -> str:
    return f"{count:,} block{'' if count == 1 else 's'}"


def _server(stats: pb.StatsResponse) -> Iterator[Finding]:
    """The server's files, event loop and certificates."""
    for name in stats.server.refused_files:
        shown = escaped(name, MAX_NAME_CHARS)
        yield error(
            f"file of {shown}",
            f"the server cannot use the file of its {shown} as the file is now, and what it held before stays in "
            "force: a revocation may wait",
            "the server's log names the file, the line or mode, and why; mend it, which needs no restart",
        )
    yield _lag(stats.server.loop_lag_p99_seconds, stats.server.loop_lag_max_seconds)
    for name, ends_at in stats.server.certificate_ends.items():
        check = _CERTIFICATES.get(name, f"certificate {escaped(name, MAX_NAME_CHARS)}")
        yield certificate_end(check, ends_at - stats.server.unix_seconds, "replace its file, which needs no restart")


def _lag(p99_s: float, longest_s: float) -> Finding:
    """Args: p99_s: 0 if it is not known."""
    if p99_s <= LATE_S[0] and longest_s <= SLOW_LAG_S:
        return ok("loop lag", f"the server's event loop was at most {longest_s * 1e3:.1f} ms late in the last minute")
    quantile = f", and up to {_step_ms(p99_s):,.0f} ms late at p99" if p99_s else ""
    return (error if p99_s > LATE_S[1] else warning)(
        "loop lag",
        f"in the last minute the server's event loop was up to {_step_ms(longest_s):,.0f} ms late at worst{quantile}",
        "give the server a core of its own; engines that compute on all cores take it away",
    )


def _step_ms(seconds: float) -> float:
    """The next of 1, 2, 5, 10, ... ms: the dashboard's text changes rarely, which screen readers read out each time."""
    return next(step for step in _STEPS_MS if step >= seconds * 1e3 or step == _STEPS_MS[-1])


def certificate_end(check: str, left_s: float, fix: str) -> Finding:
    """Whether a certificate ends soon; `left_s` is negative after its end."""
    if left_s <= 0:
        return error(check, f"the certificate ended {duration_text(-left_s)} ago", fix)
    text = f"the certificate ends in {duration_text(left_s)}"
    if left_s > ENDS_SOON_S[0]:
        return ok(check, text)
    return (error if left_s <= ENDS_SOON_S[1] else warning)(check, text, fix)


def _quotas(stats: pb.StatsResponse, window: Window) -> Iterator[Finding]:
    """Subjects at their quotas, while quotas evict blocks or after they did. A full quota alone is no finding."""
    is_evicting = window.grown(_EVICTED) > 0
    if not is_evicting and not _total(stats, _EVICTED):
        return
    when = window.when if is_evicting else SINCE_START
    full = [quota for quota in stats.quotas if quota.used_bytes >= FULL_SHARE * quota.limit_bytes > 0]
    for quota in full[:MAX_QUOTAS]:
        subject = escaped(quota.subject, MAX_NAME_CHARS)
        text = f"{subject} has reached its quota of {size_text(quota.limit_bytes)}, and quotas evicted blocks {when}"
        fix = "raise the quota if the subject's hit ratio has fallen: `kvpool quota`"
        yield (warning if is_evicting else info)("quotas", text, fix)


def _engines(stats: pb.StatsResponse) -> list[Finding]:
    """Whether the engines that report have the server's release, a fast transport and a closed breaker."""
    found = []
    if away := [each for each in stats.engines if each.breaker_open]:
        text = f"circuit breakers are open, and engines do without the pool because their calls failed: {_names(away)}"
        fix = "engines come back by themselves; if not, look at their logs, their endpoint and the network between"
        found.append(warning("engines", text, fix))
    if slow := [each for each in stats.engines if each.transport.startswith("grpc")]:
        text = f"engines move bytes through gRPC, which is slow: {_names(slow)}"
        found.append(warning("engines", text, "their logs say why the faster transports do not work"))
    version = stats.server.version
    if others := [each for each in stats.engines if each.version != version]:
        theirs = escaped(others[0].version, MAX_NAME_CHARS)
        text = f"engines have kvpool {theirs}, and the server {escaped(version, MAX_NAME_CHARS)}: {_names(others)}"
        found.append(warning("engines", text, "install the same release on both sides"))
    if found or not stats.engines:
        return found
    return [ok("engines", f"{len(stats.engines)} engines report, and none has a problem")]


def _names(found: Sequence[pb.EngineState]) -> str:
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return escaped(found[0].engine, MAX_NAME_CHARS) + more
