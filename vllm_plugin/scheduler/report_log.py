"""What of an engine's sums the server has acknowledged, and the report that is under way.

Invariant: the reports that were acknowledged, each counted once, add up to the sums when the newest of them was made. A
report is sent again as it was until it is acknowledged, whatever has been counted since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_plugin.metrics import CAUSE_PREFIX


@dataclass(frozen=True, slots=True)
class Delta:
    """What one report says was counted.

    Args:
        sequence: the report's number, from 1.
        counts: by name, as in `Recorder.totals`; without zeros.
    """

    sequence: int
    counts: Mapping[str, float] = field(default_factory=dict)

    def computed_tokens(self) -> dict[str, int]:
        """Computed tokens by cause."""
        return {
            name.removeprefix(CAUSE_PREFIX): int(count)
            for name, count in self.counts.items()
            if name.startswith(CAUSE_PREFIX)
        }


class ReportLog:
    """One engine's. Not thread-safe."""

    def __init__(self) -> None:
        self._acknowledged: dict[str, float] = {}
        self._sequence = 0
        self._under_way: Delta | None = None
        self._sent: dict[str, float] = {}

    @property
    def is_under_way(self) -> bool:
        """Whether a report was made and not acknowledged."""
        return self._under_way is not None

    def next(self, totals: Mapping[str, float]) -> Delta:
        """The report to send: the one that is under way, or a new one.

        Args:
            totals: sums since the start, by name; none ever goes back.
        """
        if self._under_way is None:
            self._sequence += 1
            self._sent = dict(totals)
            before = self._acknowledged
            counts = {name: total - before.get(name, 0) for name, total in totals.items() if total != before.get(name)}
            self._under_way = Delta(self._sequence, counts)
        return self._under_way

    def acknowledged(self) -> None:
        """The server has counted the report that is under way, or will never take it."""
        self._under_way, self._acknowledged = None, self._sent
