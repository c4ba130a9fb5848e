"""Which permits are in force: memory that the server shares with its data workers.

The server alone writes the table. A ticket or lease (a hold) has an entry there from its first permit on; the entry
contains the hold's id, and 0 once the hold has ended. Each connection of a worker writes one word: the id of the hold
whose regions it is moving, and 0 between transfers. The words are hazard pointers (Michael, 2004):

    worker                                  server
    word = id                               entry = 0
    fence                                   fence
    entry is not id: refuse the transfer    a word is id: keep the slots until the word has changed

In every interleaving at least one of the two sees what the other has written. So a transfer begins only under a hold
that is live, and a slot is given to another owner only when no transfer of its last owner is under way. Neither side
ever waits for the other: a worker that is stopped, or whose client is slow, keeps its slots and nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import threading
from typing import NamedTuple

from kvpool.transport.data_port import Kind, Offsets, Signer, Terms
from kvpool.transport.segment import sealed_file

_WORD_BYTES = 8
_ENTRY_WORDS = 3
"""Of an entry of the table: the hold's id, and its bound."""


class Bound(NamedTuple):
    """How many connections to a worker an owner may have.

    Args:
        owner: a number for the owner's name; 0: no owner, whose connections have no bound.
    """

    owner: int = 0
    max_connections: int = 0

    @classmethod
    def of(cls, name: str, max_connections: int) -> Bound:
        return cls(_number_of(name), max_connections)


NO_BOUND = Bound()


@functools.lru_cache(1_024)
def _number_of(name: str) -> int:
    """64 bits of a hash, never 0."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=_WORD_BYTES).digest()) or 1


class PermitTable:
    """The server's side. Not thread-safe: the event loop owns it.

    Args:
        key: signs permits; the workers check them with it.
        num_entries: most holds that have permits at once.
        words_per_worker: one for each connection.
        sealed: whether the workers' connections are encrypted, and permits come with their keys.

    Attributes:
        entries_fd, words_fd: descriptors of the memory, for the workers.
        entries: uint64 [num_entries, 3], flat.
    """

    def __init__(self, key: bytes, num_entries: int, num_workers: int, words_per_worker: int, *, sealed: bool = False):
        self.key = key
        self.sealed = sealed
        self.num_workers = num_workers
        self.entries_fd, self.entries = _share("kvpool-permits", num_entries * _ENTRY_WORDS)
        self.words_fd, self._words = _share("kvpool-transfers", num_workers * words_per_worker)
        self._idle = bytes(self._words.nbytes)
        self._words_per_worker = words_per_worker
        self._signer = Signer(key)
        self._fence = Fence()
        self._entry_of: dict[int, int] = {}
        self._free = list(range(num_entries - 1, -1, -1))

    def permit(
        self, kind: Kind, hold_id: int, deadline_ns: int, region_bytes: int, offsets: Offsets, bound: Bound = NO_BOUND
    ) -> bytes:
        """A permit of a live hold for these regions, until `end` or `deadline_ns` of CLOCK_MONOTONIC.

        Of an owner's bounds the latest one counts.
        """
        entry = self._entry_of.get(hold_id)
        if entry is None:
            entry = self._entry_of[hold_id] = self._free.pop()
            self.entries[entry * _ENTRY_WORDS] = hold_id
        self.entries[entry * _ENTRY_WORDS + 1], self.entries[entry * _ENTRY_WORDS + 2] = bound
        permit = self._signer.permit(kind, hold_id, Terms(deadline_ns, entry), region_bytes, offsets)
        return permit + self._signer.key_of(permit) if self.sealed else permit

    def end(self, hold_id: int) -> bool:
        """Ends all permits of a hold. False if a worker is moving bytes under one: `active` tells when it has left."""
        entry = self._entry_of.pop(hold_id, None)
        if entry is None:
            return True
        self.entries[entry * _ENTRY_WORDS] = 0
        self._free.append(entry)
        self._fence()
        # Most often no word is set. NumPy would take four times as long where its code is not in the core's cache.
        return self._words.tobytes() == self._idle or hold_id not in self._words.tolist()

    def active(self) -> set[int]:
        """Ids of the holds under which workers are moving bytes, and 0."""
        return set(self._words.tolist())

    def words_of(self, worker: int) -> memoryview:
        """A worker's words: uint64 [words_per_worker]."""
        start = worker * self._words_per_worker
        return self._words[start : start + self._words_per_worker]

    def worker_ended(self, worker: int) -> None:
        """Clears the words of a worker whose process has ended."""
        words = self.words_of(worker)
        words[:] = memoryview(bytes(words.nbytes)).cast("Q")

    def close(self) -> None:
        os.close(self.entries_fd)
        os.close(self.words_fd)


class TransferWord:
    """A connection's side: its word, and the table. One thread.

    Args:
        entries: uint64 [num_entries, 3], flat, which the server writes.
        word: uint64 [1], which this connection alone writes.
    """

    def __init__(self, entries: memoryview, word: memoryview):
        self._entries = entries
        self._word = word
        self._fence = Fence()

    def is_live(self, hold_id: int, terms: Terms) -> bool:
        return bool(self._entries[terms.entry * _ENTRY_WORDS] == hold_id)

    def bound(self, terms: Terms) -> Bound:
        """That of a hold's owner. It is another's if the hold has ended: ask `is_live` next."""
        at = terms.entry * _ENTRY_WORDS
        return Bound(self._entries[at + 1], self._entries[at + 2])

    def begin(self, hold_id: int) -> None:
        """Announces a transfer under a hold. Ask `is_live` next, and call `end` whatever it says."""
        self._word[0] = hold_id
        self._fence()

    def end(self) -> None:
        """Says that no byte of the arena is touched any more. Idempotent."""
        self._word[0] = 0


class Fence:
    """Has other processors see the caller's earlier stores before the caller's later loads are done.

    Python has no fence; a lock that is released and acquired is one: these are atomic operations, around which x86
    moves nothing, and ARM moves no acquire before an earlier release.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


def map_words(fd: int, *, writable: bool) -> memoryview:
    """In a worker: memory of a `PermitTable`, as uint64 [words]."""
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    return memoryview(mmap.mmap(fd, 0, access=access)).cast("Q")


def _share(name: str, num_words: int) -> tuple[int, memoryview]:
    fd = sealed_file(name, num_words * _WORD_BYTES)
    return fd, map_words(fd, writable=True)
