"""What clients know better than any policy: which prefixes to keep, and which are needed no more.

A hint names a prefix from its beginning, one run a group. It changes the order of evictions, nothing else: what is
readable, leased or being written stays so.

A pin has an entry evicted after all that are not pinned, and keeps nothing from being evicted. An entry records when
its pin ends; what the pins of a namespace take is counted by their ends, so that a pin that ends costs no visit of its
entries.

Invariants of pins:
- A pinned entry's parent, if it is live, is pinned at least as long: only leaves are evicted, so that a pin on a
  prefix's end alone would keep the whole prefix, whatever the budget.
- The bytes that count for a tenant are those of the slots of its pinned entries, and never more than its budget.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvpool.protocol.types import BlockRun
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.namespaces import Namespaces
from kvpool_server.cache.placement import Placement
from kvpool_server.cache.steps import Steps

HINT_STEP_BLOCKS = 512
"""Blocks of one step: less than 1 ms."""
MAX_PIN_S = 86_400
"""A longer pin is cut to it."""
ENDS_PER_DOUBLING = 64
"""Pins end at one of so many times in the second half of their time, which bounds what is counted apart: a pin lasts up
to 1/64 longer than asked for, and 1 s at least."""


@dataclass(frozen=True, slots=True)
class PinBudget:
    """What a tenant may pin, and has pinned, in bytes of slots, as `PinBudget` in the proto."""

    tenant: str
    limit_bytes: int
    used_bytes: int


class Pins:
    """The pins of one pool; each tenant may pin `budget_bytes`."""

    def __init__(self, budget_bytes: int):
        self._budget_bytes = budget_bytes
        self._by_namespace: dict[bytes, Counter[int]] = {}  # Bytes by the end of the pins.
        self._by_tenant: Counter[str] = Counter()
        self._ends: list[tuple[int, bytes, str]] = []  # A heap: each end in `_by_namespace`, with the tenant.
        self.next_end = math.inf  # From then on, `expire` is worth a call.

    def pin(self, entry: Entry, until: int, now: float) -> bool:
        """Pins an entry, or prolongs its pin; False if its tenant's budget is exceeded or its parent is not pinned."""
        parent, before = entry.parent, entry.pinned_until
        if parent is not None and parent.live:
            until = min(until, parent.pinned_until)
        if until <= before or until <= now:
            return before > now
        group = entry.group
        if before > now:
            self._uncharge(entry)
        elif self._by_tenant[group.declared_tenant] + group.spec.slot_bytes > self._budget_bytes:
            return False
        self._charge(entry, until)
        return True

    def unpin(self, entry: Entry) -> None:
        """Ends an entry's pin, also one whose time is over. No child of a live entry may be pinned longer than it."""
        self._uncharge(entry)
        _set(entry, 0)

    def expire(self, now: float) -> None:
        """Counts the pins that have ended no longer."""
        while self._ends and self._ends[0][0] <= now:
            end, fingerprint, tenant = heapq.heappop(self._ends)
            by_end = self._by_namespace[fingerprint]
            self._take(tenant, by_end.pop(end))
            if not by_end:
                del self._by_namespace[fingerprint]
        self.next_end = self._ends[0][0] if self._ends else math.inf

    def pinned_bytes(self, fingerprint: bytes | None = None) -> int:
        """Bytes of slots of a namespace's pinned entries, or of all."""
        if fingerprint is None:
            return self._by_tenant.total()
        return sum(self._by_namespace.get(fingerprint, {}).values())

    def budgets(self, tenants: Iterable[str] | None = None) -> list[PinBudget]:
        """What these tenants may pin, and have pinned, by tenant; by default those that have pinned something."""
        used = self._by_tenant
        tenants = used if tenants is None else tenants
        return [PinBudget(each, self._budget_bytes, used.get(each, 0)) for each in sorted(set(tenants))]

    def _charge(self, entry: Entry, until: int) -> None:
        group = entry.group
        by_end = self._by_namespace.setdefault(group.fingerprint, Counter())
        if until not in by_end:
            heapq.heappush(self._ends, (until, group.fingerprint, group.declared_tenant))
            self.next_end = self._ends[0][0]
        by_end[until] += group.spec.slot_bytes
        self._by_tenant[group.declared_tenant] += group.spec.slot_bytes
        _set(entry, until)

    def _uncharge(self, entry: Entry) -> None:
        """An entry's pin is counted no longer, if it is; `expire` may have seen to that."""
        group = entry.group
        by_end = self._by_namespace.get(group.fingerprint)
        if by_end is not None and by_end[entry.pinned_until]:
            by_end[entry.pinned_until] -= group.spec.slot_bytes
            self._take(group.declared_tenant, group.spec.slot_bytes)

    def _take(self, tenant: str, nbytes: int) -> None:
        self._by_tenant[tenant] -= nbytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


def _set(entry: Entry, until: int) -> None:
    before, entry.pinned_until = entry.pinned_until, until
    if entry.queued is not None:
        entry.queued.pin_changed(entry, before)


def pin_end(seconds: int, now: float) -> int:
    """When a pin of so many seconds ends: at one of few times, not before they have passed."""
    seconds = min(seconds, MAX_PIN_S)
    step = 1 << max(0, seconds.bit_length() - ENDS_PER_DOUBLING.bit_length())
    return -(-math.ceil(now + seconds) // step) * step


@dataclass(frozen=True, slots=True)
class HintResult:
    """What became of a hint, in blocks, as `HintResponse` in the proto."""

    num_blocks: int
    num_refused: int = 0
    num_pending: int = 0


@dataclass(eq=False)
class Hints:
    """Pin prefixes, end their pins, and have prefixes evicted before others."""

    _namespaces: Namespaces
    _placement: Placement
    _pins: Pins
    _clock: Callable[[], float]
    _counters: dict[str, int]

    def pin_in_steps(self, fingerprint: bytes, runs: Sequence[BlockRun], seconds: int) -> Steps[HintResult]:
        """Pins complete blocks of prefixes for so many seconds: the first ones, as many as the budget has room for.

        A pin that would end later stays.
        """
        _, groups = self._namespaces.groups(fingerprint, runs)
        until = pin_end(seconds, self._clock())
        num_pinned = num_refused = 0
        for group, run in zip(groups, runs, strict=True):
            for at in range(0, len(run), HINT_STEP_BLOCKS):
                now = self._clock()
                for entry in group.index.get_all(run.block_hashes[at : at + HINT_STEP_BLOCKS]):
                    if entry is None or not entry.complete:
                        continue
                    if not self._pins.pin(entry, until, now):
                        num_refused += 1
                        continue
                    num_pinned += 1
                    if entry.used < 0:
                        entry.used = self._placement.stamp
                yield
        self._counters["pin_granted_blocks"] += num_pinned
        self._counters["pin_refused_blocks"] += num_refused
        return HintResult(num_pinned, num_refused=num_refused)

    def unpin_in_steps(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> Steps[HintResult]:
        """Ends the pins of prefixes, from their ends to where other prefixes begin that are stored, too."""

        def unpin(entry: Entry) -> bool:
            if entry.pinned_until > self._clock():
                self._pins.unpin(entry)
                return True
            return False

        return (yield from self._from_the_end(fingerprint, runs, unpin, keeps=lambda _: False))

    def expire_in_steps(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> Steps[HintResult]:
        """Has blocks evicted before all others, unless they are used before.

        They are those from the prefixes' ends to where other prefixes begin that are stored, too, or pinned blocks.
        """

        def expire(entry: Entry) -> bool:
            self._placement.expire(entry)
            return True

        result = yield from self._from_the_end(
            fingerprint, runs, expire, keeps=lambda entry: entry.pinned_until > self._clock()
        )
        self._counters["expired_by_hint_blocks"] += result.num_blocks
        return result

    def _from_the_end(
        self, fingerprint: bytes, runs: Sequence[BlockRun], do: Callable[[Entry], bool], keeps: Callable[[Entry], bool]
    ) -> Steps[HintResult]:
        """Calls `do` for the entries that belong to these prefixes alone; counts for how many it was True.

        An entry for which `keeps` is True is left alone, with those before it.
        """
        _, groups = self._namespaces.groups(fingerprint, runs)
        num_done = 0
        for group, run in zip(groups, runs, strict=True):
            child: Entry | None = None
            for nth in range(len(run) - 1, -1, -1):
                if not (nth + 1) % HINT_STEP_BLOCKS:
                    yield
                entry = group.index.get(run.block_hashes[nth])
                if entry is None:
                    continue
                # What is stored and continues the entry, but for `child`, needs it.
                has_others = entry.children != (child is not None and child.live and child.parent is entry)
                if has_others or keeps(entry):
                    break
                num_done += do(entry)
                child = entry
            yield
        return HintResult(num_done)
