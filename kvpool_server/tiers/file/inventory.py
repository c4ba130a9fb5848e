"""The blocks that a journal lists, built up frame by frame."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvpool.namespace import NamespaceSpec
from kvpool_server.cache.entry import Record
from kvpool_server.tiers.file import frames
from kvpool_server.tiers.file.frames import GroupKey


class Inventory:
    """See the module. One thread applies frames; other threads may `get` single records meanwhile.

    Attributes:
        extent_bytes: 0 until the first frame is known.
        specs: by fingerprint.
        groups: the blocks of each group by hash, in the order in which they were stored.
        nbytes: of the journal, up to the end of the last frame that was applied.
        is_exact: True if the journal lists these blocks and nothing else, and ends with a whole frame.
        trouble: why a whole frame was not applied; empty if none was refused.
    """

    def __init__(self) -> None:
        self.extent_bytes = 0
        self.specs: dict[bytes, NamespaceSpec] = {}
        self.groups: dict[GroupKey, dict[bytes, Record]] = {}
        self.nbytes = 0
        self.is_exact = True
        self.trouble = ""
        self._at: dict[int, tuple[GroupKey, bytes]] = {}

    def __len__(self) -> int:
        return len(self._at)

    def apply(self, text: bytes | memoryview) -> int:
        """Applies the frames up to the first that is torn or invalid; returns how many bytes were applied."""
        done = 0
        self.trouble = ""
        for frame in frames.decode_frames(memoryview(text)):
            try:
                self._apply_frame(frame.kind, frame.payload)
            except Exception as error:  # Another version or program wrote the frame: the journal ends before it.
                self.trouble = f"{type(error).__name__}: {error}"
                break
            done = frame.end
        self.nbytes += done
        self.is_exact = done == len(text)
        return done

    def _apply_frame(self, kind: int, payload: memoryview) -> None:
        """May raise anything; has changed nothing then."""
        if kind == frames.HEAD:
            self.extent_bytes = frames.decode_head(payload)
        elif kind == frames.NAMESPACE:
            spec = frames.decode_namespace(payload)
            self.specs[spec.fingerprint()] = spec
        elif kind == frames.STORED:
            self._store(payload)
        elif kind == frames.REMOVED:
            for offset in frames.decode_removed(payload):
                self._remove(offset)

    def _store(self, payload: memoryview) -> None:
        group, num_shards, stored = frames.decode_stored(payload)
        spec = self.specs.get(group[0])
        if not num_shards or (spec is not None and spec.groups[group[1]].num_shards != num_shards):
            raise ValueError(f"blocks with {num_shards} checksums")
        records = self.groups.setdefault(group, {})
        for record in stored:
            if record.offset in self._at:
                self._remove(record.offset)
            if (old := records.pop(record.block_hash, None)) is not None:
                del self._at[old.offset]
            records[record.block_hash] = record
            self._at[record.offset] = (group, record.block_hash)

    def _remove(self, offset: int) -> None:
        at = self._at.pop(offset, None)
        if at is not None:
            self.groups[at[0]].pop(at[1], None)

    def keep_only(self, is_wanted: Callable[[GroupKey, Record], bool]) -> None:
        """Drops the blocks that are not wanted."""
        for group, records in self.groups.items():
            for record in [record for record in records.values() if not is_wanted(group, record)]:
                del records[record.block_hash], self._at[record.offset]
                self.is_exact = False

    def get(self, group: GroupKey, block_hash: bytes) -> Record | None:
        records = self.groups.get(group)
        return None if records is None else records.get(block_hash)

    def encode(self) -> Iterator[bytes]:
        """A journal that lists these blocks, in the order in which they were stored: parents before children.

        The journal names all namespaces, also those without blocks: its writer has noted that they are named, and does
        not name them again.
        """
        yield frames.encode_head(self.extent_bytes)
        for spec in self.specs.values():
            yield frames.encode_namespace(spec)
        for group, records in self.groups.items():
            if records:
                yield frames.encode_stored(group, list(records.values()))
