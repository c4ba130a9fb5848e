"""How long a request waits for blocks on their way up from a tier.

A request waits no longer than computing the blocks would take, and not for a tier that brings nothing. `now` is
monotonic seconds.
"""

from __future__ import annotations

import math

STUCK_S = 0.25
"""A tier that has brought no block for so long, and over two more answers, may have lost them: the wait ends."""


class PromotionWait:
    """The wait of one request, over all its lookups.

    Args:
        wait_s: the longest wait; 0: the request takes the blocks that are ready at once.

    Attributes:
        began_at: when an answer first said that blocks are on their way; infinite until then.
    """

    def __init__(self, wait_s: float):
        self.began_at = math.inf
        self._ends_at = math.inf
        self._due_at = math.inf
        self._num_ready = -1
        self._progress_at = -math.inf
        self._wait_s = wait_s

    def lasts(self, now: float, num_ready: int, compute_s: float, retry_s: float) -> bool:
        """Whether to ask again, after an answer with blocks on their way.

        Args:
            num_ready: blocks that are ready, in any measure that grows with them.
            compute_s: seconds of computing the blocks on their way; infinite while unknown.
            retry_s: when asking again is worth it. If that is too late, the wait ends at once.
        """
        if math.isinf(self.began_at):
            self.began_at, self._ends_at = now, now + self._wait_s
        if num_ready > self._num_ready:
            self._num_ready, self._progress_at = num_ready, now
        self._ends_at = min(self._ends_at, now + compute_s)
        self._due_at = now + retry_s
        return self._due_at < self._ends_at and now - self._progress_at < max(STUCK_S, 2 * retry_s)

    def is_due(self, now: float) -> bool:
        """Whether it is time to ask again."""
        return now >= self._due_at

    def has_ended(self, now: float) -> bool:
        return now >= self._ends_at
