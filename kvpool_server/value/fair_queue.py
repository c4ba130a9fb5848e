"""A bounded queue that tenants share: no tenant's items are left out, or wait long, because another tenant sends more.

- Room: if the queue is full, the tenant with most in it loses its newest items. So each tenant is sure of an equal
  share, and may use what others leave free.
- Service: the next item is one of the tenant that was served least. A tenant with nothing queued saves up no claim.

Sources: B. Suter, T. Lakshman, D. Stiliadis, A. Choudhury, Buffer Management Schemes for Supporting TCP in Gigabit
Routers with Per-flow Queueing, IEEE JSAC 1999: drop from the longest queue. A. Demers, S. Keshav, S. Shenker, Analysis
and Simulation of a Fair Queueing Algorithm, SIGCOMM 1989.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

MAX_SHARES = 32
"""Tenants with a share of their own; of more tenants with something queued, the rest have one together."""

Item = TypeVar("Item")


class _Share(Generic[Item]):
    """What one tenant has in the queue.

    Attributes:
        items: with the cost of each.
        cost: of all items.
        served: seconds of service, or those of the share that was served least when this one's first item came.
        pushed_at, lost_at: when the tenant last pushed, and last lost an item.
    """

    def __init__(self) -> None:
        self.items: deque[tuple[Item, int]] = deque()
        self.cost = 0
        self.served = 0.0
        self.pushed_at = self.lost_at = -1.0


class FairQueue(Generic[Item]):
    """See the module. Not thread-safe.

    Args:
        max_cost: of all items together.
    """

    def __init__(self, max_cost: int):
        self._max_cost = max_cost
        self._cost = 0
        self._shares: dict[str | None, _Share[Item]] = {}  # None: the rest.
        self._last: _Share[Item] = _Share()

    def __len__(self) -> int:
        return sum(len(share.items) for share in self._shares.values())

    def push(self, tenant: str, item: Item, cost: int, now: float) -> int:
        """Queues an item; returns how many items were left out for it. The item itself may be one of them.

        Args:
            cost: at least 1.
            now: in seconds, from 0 on.
        """
        share = self._share_of(tenant)
        if not share.items:
            share.served = max(share.served, self._last.served)
        share.pushed_at = now
        share.items.append((item, cost))
        share.cost += cost
        self._cost += cost
        num_left_out = 0
        while self._cost > self._max_cost:
            longest = max(self._shares.values(), key=lambda each: each.cost)
            lost_cost = longest.items.pop()[1]
            longest.cost -= lost_cost
            self._cost -= lost_cost
            longest.lost_at = now
            num_left_out += 1
        return num_left_out

    def _share_of(self, tenant: str) -> _Share[Item]:
        share = self._shares.get(tenant)
        if share is None:
            if len(self._shares) >= MAX_SHARES:
                idle = [name for name, each in self._shares.items() if name is not None and not each.items]
                if not idle:
                    return self._shares.setdefault(None, _Share())
                del self._shares[min(idle, key=lambda name: self._shares[name].pushed_at)]
            share = self._shares[tenant] = _Share()
        return share

    def pop(self) -> Item | None:
        """The next item; None if nothing is queued. Tell `charge` how long it took."""
        waiting = [share for share in self._shares.values() if share.items]
        if not waiting:
            return None
        self._last = share = min(waiting, key=lambda each: each.served)
        item, cost = share.items.popleft()
        share.cost -= cost
        self._cost -= cost
        return item

    def charge(self, seconds: float) -> None:
        """Serving the item that `pop` returned last took so long."""
        self._last.served += seconds

    def have_all_lost(self, since: float, active_since: float) -> bool:
        """Whether each tenant that pushed after `active_since` has lost an item since `since`, and there is one."""
        active = [share for share in self._shares.values() if share.pushed_at >= active_since]
        return bool(active) and all(share.lost_at >= since for share in active)
