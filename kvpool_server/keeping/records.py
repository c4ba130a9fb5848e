"""Records of blocks, as they lie in the table: uint64 [11 + shards] each.

    0       checksum
    1       stamp of the last use
    2       place of the namespace (16 bits), group (16 bits), end of the pin in seconds of the system's clock (32 bits)
    3, 7    hash, parent's hash
    11      xxh3-64 of each shard

The checksum leaves out the last use and the end of the pin, which are written now and then.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.protocol.types import HASH_BYTES
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.server_access import Columns

Words = npt.NDArray[np.uint64]

WORD_BYTES = 8
_USED, _KEY, _HASH, _PARENT, _SUMS = 1, 2, 3, 7, 11
_ROOT = bytes(HASH_BYTES)
_KEY_MASK, _PIN_SHIFT, _HALF = np.uint64((1 << 32) - 1), np.uint64(32), np.uint64(32)


def record_bytes(num_shards: int) -> int:
    """Of a block's record."""
    return (_SUMS + num_shards) * WORD_BYTES


def records_of(place: int, entries: Sequence[Entry], at: Sequence[int], secret: int) -> Words:
    """The records of complete entries of one group, whose namespace has a place; `at` says where each will lie."""
    group = entries[0].group
    records = np.empty((len(entries), _SUMS + group.spec.num_shards), np.uint64)
    records[:, 0] = at
    records[:, _USED] = _uses(entries)
    records[:, _KEY] = place | group.idx << 16
    records[:, _HASH:_PARENT] = _rows([entry.block_hash for entry in entries])
    records[:, _PARENT:_SUMS] = _rows([entry.parent_hash or _ROOT for entry in entries])
    records[:, _SUMS:] = _rows([entry.checksums for entry in entries])
    records[:, 0] = _checks(records, secret)
    return records


def mark(words: Words, at: Sequence[int], entries: Sequence[Entry]) -> None:
    """Writes the last uses and the ends of the pins of entries whose records lie there in a table's words."""
    first = np.array(at) // WORD_BYTES
    pins = np.array([entry.pinned_until for entry in entries], np.uint64) << _PIN_SHIFT
    words[first + _USED] = _uses(entries)
    words[first + _KEY] = words[first + _KEY] & _KEY_MASK | pins


def whole(records: Words, at: npt.NDArray[np.int64], secret: int) -> npt.NDArray[np.bool_]:
    """Which records from there are whole."""
    told = records.copy()
    told[:, 0] = at
    told[:, _KEY] &= _KEY_MASK
    return records[:, 0] == _checks(told, secret)


def by_key(records: Words) -> dict[tuple[int, int], npt.NDArray[np.int64]]:
    """Which records are of each namespace's place and group."""
    keys = records[:, _KEY] & _KEY_MASK
    return {(key & 0xFFFF, key >> 16): np.flatnonzero(keys == key) for key in np.unique(keys).tolist()}


def columns_of(records: Words, offsets: Sequence[int]) -> Columns:
    """What whole records of one group say, whose slots lie at these offsets."""
    num_shards, sums = records.shape[1] - _SUMS, array("Q", records[:, _SUMS:].tobytes())
    hashes, parents = records[:, _HASH:_PARENT], records[:, _PARENT:_SUMS]
    names = _hashes(hashes)
    parent_names = [b"", *names[:-1]]  # The same objects: most blocks follow the one before.
    others = np.flatnonzero((parents[1:] != hashes[:-1]).any(axis=1)) + 1
    for nth, parent in zip([0, *others.tolist()], _hashes(parents[np.append(0, others)]), strict=True):
        parent_names[nth] = b"" if parent == _ROOT else parent
    return Columns(
        offsets,
        names,
        parent_names,
        [sums[start : start + num_shards] for start in range(0, len(sums), num_shards)],
        records[:, _USED].astype(np.int64).tolist(),
        (records[:, _KEY] >> _PIN_SHIFT).tolist(),
    )


def _hashes(rows: Words) -> list[bytes]:
    return np.ascontiguousarray(rows).view(f"V{HASH_BYTES}").reshape(-1).tolist()  # type: ignore[no-any-return]


def _uses(entries: Sequence[Entry]) -> Words:
    return np.array([entry.used for entry in entries], np.int64).view(np.uint64)


def _rows(values: Sequence[bytes | array[int]]) -> Words:
    """uint64 [values, words of each]."""
    return np.frombuffer(b"".join(values), np.uint64).reshape(len(values), -1)


def _checks(records: Words, secret: int) -> Words:
    """Checksums of records that have their places as first words. Factors are odd: a change of one word changes a sum.

    A record whose sum is 0, one in 2**64, counts as absent.
    """
    return (records ^ records >> _HALF) @ _factors(records.shape[1], secret)


@functools.cache
def _factors(count: int, secret: int) -> Words:
    """Of each word; 0: it is not summed."""
    digests = [xxhash.xxh3_64_intdigest(nth.to_bytes(8, "little"), secret) | 1 for nth in range(count)]
    digests[_USED] = 0
    return np.array(digests, np.uint64)
