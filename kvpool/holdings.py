"""What a server holds of each namespace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.namespace import NamespaceSpec


@dataclass(frozen=True, slots=True)
class TierHoldings:
    """What the tier named `tier` holds of a namespace: `num_entries` blocks of `nbytes` together."""

    tier: str
    num_entries: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """An open namespace, as its server knows it.

    Args:
        spec: from a server, as `NamespaceSpec.listed`: with digests in the place of secrets.
        num_entries: complete blocks in the arena.
        nbytes: size of those blocks' slots.
        lookup_blocks: blocks that lookups asked for since the namespace was opened.
        lookup_hits: blocks of those that lookups found complete.
        age_seconds: time since the namespace was opened on this server.
        idle_seconds: time since an engine last opened it, put, or looked up with a lease.
        superseded: an engine has opened a namespace of newer weights, and no engine has used this one since. Its blocks
            are evicted first.
        tiers: what each tier holds of the namespace, as far as the server knows.
        opened_by: host of the client that opened the namespace first on this server; empty if unknown.
        computed_tokens: prompt tokens that engines have computed since the server's start, by cause, as they report.
        saved_seconds, lost_seconds: what loads have saved and lost since then, as engines estimate.
        pinned_bytes: of slots of its pinned blocks.
    """

    spec: NamespaceSpec
    fingerprint: bytes
    num_entries: int = 0
    nbytes: int = 0
    lookup_blocks: int = 0
    lookup_hits: int = 0
    age_seconds: float = 0.0
    idle_seconds: float = 0.0
    superseded: bool = False
    tiers: tuple[TierHoldings, ...] = ()
    opened_by: str = ""
    computed_tokens: Mapping[str, int] = field(default_factory=dict)
    saved_seconds: float = 0.0
    lost_seconds: float = 0.0
    pinned_bytes: int = 0

    @property
    def hit_ratio(self) -> float | None:
        """Share of the blocks asked for that lookups found; None before the first lookup."""
        return self.lookup_hits / self.lookup_blocks if self.lookup_blocks else None

    @property
    def opened(self) -> str:
        """Text such as "opened by HOST, 3 min ago"."""
        whose = f"opened by {self.opened_by}" if self.opened_by else "found in a tier, or opened by an unknown host"
        return f"{whose}, {duration_text(self.age_seconds)} ago"


def printable(text: str) -> str:
    """Text from outside, made safe for logs and terminals: without control characters and line ends."""
    return "".join(char for char in text if char.isprintable())


def escaped(text: str, most: int) -> str:
    """Text from outside for logs, terminals and errors: at most `most` characters of it, others than printable ones
    as escapes."""
    shown = text if len(text) <= most else f"{text[:most]}..."
    if shown.isprintable():
        return shown
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown)


def duration_text(seconds: float) -> str:
    """A duration in the largest unit that it holds at least twice: "3 min"."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
