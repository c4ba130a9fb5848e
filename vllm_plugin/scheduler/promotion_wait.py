"""How long a request waits for blocks on their way up from a tier.

Never longer than computing them would take, and not for a tier from which nothing comes. `now` is monotonic seconds.
"""

from __future__ import annotations

import math

STUCK_S = 0.25
"""A tier that has brought nothing for so long, and over two more answers, is not waited for: it may have lost them."""


class PromotionWait:
    """One request's, over all its lookups.

    Args:
        wait_s: the most that it waits; 0: it takes what is ready at once.

    Attributes:
        began_at: when it was first told that blocks are on their way; infinite while it was not.
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
            num_ready: blocks that are there, in whatever measure: it grows.
            compute_s: what computing those on their way would take; infinite while unknown.
            retry_s: after which asking again is worth it. An answer that would come too late is not waited for.
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
