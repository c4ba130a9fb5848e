"""What clients know better than any policy: which prefixes to keep, and which are needed no more.

A hint names a prefix from its beginning, one run a group. It changes the order of evictions, nothing else: what is
readable, leased or being written stays so. Not thread-safe: the pool's event loop owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.protocol.types import BlockRun
from kvpool_server.cache.allocator.placement import Placement
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.namespaces import Namespaces, PoolNamespace
from kvpool_server.cache.pins import Pins, pin_end
from kvpool_server.cache.steps import Steps

HINT_STEP_BLOCKS = 512
"""Blocks of one step: less than 1 ms."""


@dataclass(frozen=True, slots=True)
class HintResult:
    """What became of a hint, in blocks, as `HintResponse` in the proto."""

    num_blocks: int
    num_refused: int = 0
    num_pending: int = 0


@dataclass(eq=False)
class Hints:
    """See the module.

    Args:
        clock: monotonic seconds.
    """

    _namespaces: Namespaces
    _placement: Placement
    _pins: Pins
    _clock: Callable[[], float]
    _counters: dict[str, int]

    def groups(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> tuple[PoolNamespace, list[Group]]:
        """The namespace, and the group of each run. Raises InvalidRequestError for an empty or too large batch."""
        return self._namespaces.groups(fingerprint, runs)

    def pin_in_steps(self, fingerprint: bytes, runs: Sequence[BlockRun], seconds: int) -> Steps[HintResult]:
        """Has complete blocks of prefixes evicted after all that are not pinned, for so many seconds.

        The first blocks are pinned, as many as the tenant's budget has room for. A pin that would end later stays.
        """
        _, groups = self.groups(fingerprint, runs)
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
        """Has blocks of prefixes evicted before all others, unless they are used before.

        From the prefixes' ends to where other prefixes begin that are stored, too, or pinned blocks.
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
        self,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        do: Callable[[Entry], bool],
        keeps: Callable[[Entry], bool],
    ) -> Steps[HintResult]:
        """Calls `do` for the entries that belong to these prefixes alone; counts for how many it was True.

        Args:
            keeps: whether an entry, with those before it, is left alone.
        """
        _, groups = self.groups(fingerprint, runs)
        num_done = 0
        for group, run in zip(groups, runs, strict=True):
            child: Entry | None = None
            for nth in range(len(run) - 1, -1, -1):
                if not (nth + 1) % HINT_STEP_BLOCKS:
                    yield
                entry = group.index.get(run.block_hashes[nth])
                if entry is None:
                    continue
                if not _is_own(entry, child) or keeps(entry):
                    break
                num_done += do(entry)
                child = entry
            yield
        return HintResult(num_done)


def _is_own(entry: Entry, child: Entry | None) -> bool:
    """Whether nothing that is stored continues an entry but `child`, if that is live."""
    return entry.children == (child is not None and child.live and child.parent is entry)
