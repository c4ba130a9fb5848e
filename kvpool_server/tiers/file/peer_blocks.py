"""The blocks of one peer directory: the inventory that its journal gives, and the extents with the bytes.

The two belong together: a journal that was replaced makes a new `PeerBlocks`, and readers of the old one go on with the
inventory that led them there. Any failure is a miss, never an error of this server.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool_server.cache.entry import Record
from kvpool_server.tiers.file.extents import Extents
from kvpool_server.tiers.file.frames import GroupKey
from kvpool_server.tiers.file.inventory import Inventory

MAX_LOST = 65_536


class PeerBlocks:
    """See the module. One thread calls `find` and `forget`; any thread the rest, while the inventory grows."""

    def __init__(self, inventory: Inventory, extents: Extents):
        self.extent_bytes = extents.extent_bytes
        self._inventory = inventory
        self._extents = extents
        self._lost: dict[int, Record] = {}

    def find(self, group: GroupKey, block_hash: bytes) -> Record | None:
        """Where a block lies, as far as the journal has been read."""
        record = self._inventory.get(group, block_hash)
        return None if record is None or self._lost.get(record.offset) is record else record

    def forget(self, record: Record) -> None:
        """Hides a block that could not be read, until the journal has a new record of it."""
        self._lost.pop(record.offset, None)
        self._lost[record.offset] = record
        if len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]

    def read(self, offset: int, views: Sequence[memoryview]) -> bool:
        """As `Extents.read`, but False instead of an error."""
        try:
            return self._extents.read(offset, views)
        except (OSError, OverflowError):  # A failing disk, missing permissions, or an offset that no file can have.
            return False

    def close(self) -> None:
        """Reads are misses from now on. Idempotent."""
        self._extents.close()
