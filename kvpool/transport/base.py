"""What a transport is: how bytes get from a caller's buffers to regions of the arena, and back.

A transport calls back with buffers to fill or to drain, one batch of regions at a time. So shared memory needs no copy
beyond the caller's, and the network carries one batch while the caller fills or drains another.

Invariants of every transport (tests/contracts asserts them):
- `fill` and `drain` see every region once, in order, with buffers of exactly `region_bytes`.
- An exception in a callback ends the transfer and reaches the caller unchanged. After an exception in `fill`, the
  transport first waits until no byte of the write is in flight. If that wait fails, the transport raises its own error
  from the callback's.
- A call returns or raises within its `timeout_s`, apart from the time spent in callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.errors import TransferError

Buffers = Sequence[npt.NDArray[np.uint8]]
Clock = Callable[[], float]

BATCH_BYTES = 2 << 20
"""Default size of a batch: about what stays in a core's cache between the copy and the checksum."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The regions that one write or read moves, and its bounds.

    Args:
        holding_id: id of the ticket (write) or of the lease (read) that the regions belong to.
        offsets: arena offset of each region that was granted, in bytes.
        region_bytes: how many bytes of each region move.
        timeout_s: time for the whole transfer.
        batch_bytes: most bytes passed to one callback; a batch has at least one region.
        permit: the server's proof for the data port that these regions were granted; empty if there is none.
        skip_bytes: where in each region they begin: a rank moves some shards of whole slots that were granted.
        permitted_bytes: size of each region that was granted; 0: `region_bytes`.
    """

    holding_id: int
    offsets: Sequence[int]
    region_bytes: int
    timeout_s: float
    batch_bytes: int = BATCH_BYTES
    permit: bytes = b""
    skip_bytes: int = 0
    permitted_bytes: int = 0

    @property
    def starts(self) -> Sequence[int]:
        """Arena offset of the bytes that move, of each region."""
        return [offset + self.skip_bytes for offset in self.offsets] if self.skip_bytes else self.offsets

    def batches(self) -> list[tuple[int, int]]:
        """The regions as batches [start, stop), in order."""
        step = max(1, self.batch_bytes // max(1, self.region_bytes))
        count = len(self.offsets)
        return [(start, min(start + step, count)) for start in range(0, count, step)]

    def check_bounds(self, arena_bytes: int) -> None:
        """Raises TransferError unless every region ends within the arena."""
        end = max(self.starts, default=-self.region_bytes) + self.region_bytes
        if end > arena_bytes:
            raise TransferError(f"a region ends at {end}, beyond the arena's {arena_bytes} bytes")


class Fill(Protocol):
    """The callback of a write."""

    def __call__(self, first: int, buffers: Buffers, /) -> Buffers | None:
        """Writes regions [first, first + len(buffers)) into `buffers`, each uint8 [region_bytes].

        Returns:
            None. If the transport is `in_place`, the callback may instead return contiguous arrays of the same shapes
            to send from; they must keep their bytes until the write has ended.
        """


class Drain(Protocol):
    """The callback of a read."""

    def __call__(self, first: int, buffers: Buffers, /) -> Callable[[], object] | None:
        """Reads regions [first, first + len(buffers)) from `buffers`, each uint8 [region_bytes], without writing there.

        Returns:
            None if the callback no longer needs the buffers. Otherwise a function that waits until the buffers are no
            longer needed: the transport calls it before it reuses them.
        """


class Transport(Protocol):
    """How chunk bytes travel. Thread-safe."""

    name: str
    """As in `ClientConfig.transport`."""

    one_sided: bool
    """Whether bytes of a failed or abandoned write may still arrive: its ticket then has to expire."""

    in_place: bool
    """Whether the transport sends from the arrays that `fill` returns."""

    @property
    def memory(self) -> npt.NDArray[np.uint8] | None:
        """The pool's memory, if all buffers passed to callbacks lie in it; else None."""

    def write(self, transfer: Transfer, fill: Fill) -> None:
        """Writes the regions of a ticket.

        Raises:
            TransferError, PoolTimeoutError, UnavailableError, LeaseExpiredError.
        """

    def read(self, transfer: Transfer, drain: Drain) -> None:
        """Reads leased regions. Raises as `write` does."""

    def close(self) -> None:
        """Ends the transport. Idempotent."""
