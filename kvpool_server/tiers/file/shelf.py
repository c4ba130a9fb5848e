"""What another server's journal says, and the extents that go with it.

The two belong together: when the journal is another one, so is the shelf, and whoever still reads from the old one does
so by what it said. Nothing that is wrong with it is ever this server's trouble: it is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool_server.cache.entry import Record
from kvpool_server.tiers.file.extents import Extents
from kvpool_server.tiers.file.journal import GroupKey, Inventory

MAX_LOST = 65_536


class Shelf:
    """See the module. `find` and `forget` are for one thread, the others for any; the inventory may grow meanwhile."""

    def __init__(self, inventory: Inventory, extents: Extents):
        self.extent_bytes = extents.extent_bytes
        self._inventory = inventory
        self._extents = extents
        self._lost: dict[int, Record] = {}

    def find(self, group: GroupKey, block_hash: bytes) -> Record | None:
        """Where a block lies, as far as is known."""
        record = self._inventory.get(group, block_hash)
        return None if record is None or self._lost.get(record.offset) is record else record

    def forget(self, record: Record) -> None:
        """What could not be read is not there, until the journal says something new of it."""
        self._lost.pop(record.offset, None)
        self._lost[record.offset] = record
        if len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]

    def read(self, offset: int, views: Sequence[memoryview]) -> bool:
        """As `Extents.read`, but raises nothing."""
        try:
            return self._extents.read(offset, views)
        except (OSError, OverflowError):  # Its disk, its permissions, or an offset that no file can have.
            return False

    def close(self) -> None:
        """Reads are misses from now on. Idempotent."""
        self._extents.close()
