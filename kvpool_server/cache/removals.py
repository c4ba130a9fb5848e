"""Removals: blocks that a client or the server drops before their time.

Not thread-safe: the pool's event loop owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.protocol.types import BlockRun, MissCause, in_parts
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.entry_table import EntryTable
from kvpool_server.cache.namespaces import Namespaces
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, STEP_BLOCKS, Steps


@dataclass(eq=False)
class Removals:
    """See the module."""

    _namespaces: Namespaces
    _entry_table: EntryTable
    _counters: dict[str, int]
    _expire: Callable[[], float]

    def complete(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> Steps[list[Entry]]:
        """The complete entries of these blocks, each once; some may have been dropped since."""
        entries = yield from self._find(fingerprint, runs)
        return [entry for entry in entries if entry.complete]

    def _find(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> Steps[list[Entry]]:
        """The entries of these blocks, each once; some may have been dropped since."""
        _, group = self._namespaces.one_group(fingerprint, runs)
        self._expire()
        entries: dict[Entry, None] = {}
        for nth, part in enumerate(in_parts(runs, LOOKUP_STEP_BLOCKS)):
            if nth:
                yield
            entries |= dict.fromkeys(group.find(part)[0])
        return list(entries)

    def drop_corrupt(self, entries: Sequence[Entry]) -> Steps[int]:
        """Drops entries whose bytes differ from their checksums; returns how many had not been dropped before."""
        dropped = yield from self._entry_table.drop_in_steps(entries, MissCause.CORRUPT)
        self._counters["corrupt_blocks"] += dropped
        return dropped

    def remove(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> Steps[int]:
        """Drops blocks; returns how many were present. Clients that hold a lease on them finish their loads."""
        entries = yield from self._find(fingerprint, runs)
        removed = yield from self._entry_table.drop_in_steps(entries, MissCause.REMOVED)
        self._counters["removed_blocks"] += removed
        return removed

    def clear(self, fingerprint: bytes = b"") -> Steps[int]:
        """Drops every block of a namespace, or of all namespaces; returns how many.

        No lookup finds any of the blocks from the first step on, and the steps free their slots. Blocks that are put
        meanwhile stay.
        """
        self._expire()
        chosen = [self._namespaces.get(fingerprint)] if fingerprint else self._namespaces.values()
        groups = [group for namespace in chosen for group in namespace.groups]
        while any(group.leaving for group in groups):  # An earlier call has not ended.
            self._entry_table.drop_leaving(groups, STEP_BLOCKS)
            yield
        removed = sum(group.start_leaving() for group in groups)
        self._counters["removed_blocks"] += removed
        while self._entry_table.drop_leaving(groups, STEP_BLOCKS) == STEP_BLOCKS:
            yield
        return removed
