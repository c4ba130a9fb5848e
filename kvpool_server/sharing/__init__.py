"""How callers share what a server has: a bound on what all of them may have, and (`fair_slots`) turns.

It knows neither the pool nor the network.
"""

from __future__ import annotations

import math
from collections import Counter

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
