"""What a server holds of each namespace."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.namespace import NamespaceSpec


@dataclass(frozen=True, slots=True)
class TierHoldings:
    """What one tier holds of a namespace.

    Args:
        tier: its name.
        num_entries: blocks.
        nbytes: of them.
    """

    tier: str
    num_entries: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """An open namespace, as its server knows it.

    Args:
        num_entries: complete blocks.
        nbytes: of their slots.
        lookup_blocks: blocks asked for since it was opened there.
        lookup_hits: of them, found complete.
        age_seconds: since it was opened there.
        idle_seconds: since an engine last used it: opened it, put, or looked up with a lease.
        superseded: newer weights have taken its place, and nobody has used it since: evicted first.
        tiers: what the tiers hold of it, as far as the server knows.
        opened_by: host of the client that opened it first on that server; empty if it did not say.
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

    @property
    def hit_ratio(self) -> float | None:
        """Of the blocks asked for, how many were there; None if none were asked for."""
        return self.lookup_hits / self.lookup_blocks if self.lookup_blocks else None

    @property
    def opened(self) -> str:
        """For people: "opened by HOST, 3 min ago"."""
        whose = f"opened by {self.opened_by}" if self.opened_by else "found in a tier, or opened by a nameless host"
        return f"{whose}, {duration_text(self.age_seconds)} ago"


def printable(text: str) -> str:
    """What others have written as it may stand in logs and on terminals: without control characters and line ends."""
    return "".join(char for char in text if char.isprintable())


def duration_text(seconds: float) -> str:
    """A duration in the largest unit of which it has two: "3 min"."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
