"""How clients share a limit."""

from __future__ import annotations

import math
from collections import Counter


class Shares:
    """How much each client has, and `total`. A client may have as much as is left, so nobody can take all.

    k clients that take all they get have 1/(k+1) each, and the next one finds as much. The client without a name is all
    that are not told apart, and may have everything.

    Source: A. Choudhury, E. Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet Switches, 1998.
    """

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()
        self.total = 0

    def of(self, client: str) -> int:
        return self._of[client]

    def has_room(self, client: str, count: int, most: float, most_own: float = math.inf) -> bool:
        """Whether a client may have so much more, where all may have `most`, and one with a name `most_own`."""
        own = self._of[client] if client else 0
        return own + count <= min(most - self.total, most_own)

    def add(self, client: str, count: int = 1) -> None:
        """Gives a client more or, with a negative count, takes it back."""
        self.total += count
        self._of[client] += count
        if not self._of[client]:
            del self._of[client]
