"""What a transport is: how bytes get from a caller's buffers to regions of the arena, and back.

A transport calls back with buffers to fill or to drain, a batch of regions at a time, so that shared memory needs no
copy of its own and a stream can send one batch while the next is being filled.

Invariants every transport keeps (tests/contracts asserts them):
- `fill` and `drain` see every region once, in order, with buffers of exactly `region_bytes`.
- An exception in a callback ends the transfer and reaches the caller unchanged. In `fill`, it does so once nothing of
  the write is under way any more; where that cannot be had, what was in the way is raised from it.
- Nothing waits longer than `timeout_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Buffers = Sequence[npt.NDArray[np.uint8]]

BATCH_BYTES = 2 << 20
"""Bytes handed to a callback at once, unless it asks for more: about what stays in a core's cache between the copy and
the checksum."""


class Fill(Protocol):
    """The callback of a write."""

    def __call__(self, first: int, buffers: Buffers, /) -> Buffers | None:
        """Writes regions [first, first + len(buffers)) into `buffers`, each uint8 of `region_bytes`.

        Returns:
            None; or, if the transport is `in_place`, where the bytes lie instead: as many arrays, contiguous, which
            stay as they are until the write has ended.
        """


class Drain(Protocol):
    """The callback of a read."""

    def __call__(self, first: int, buffers: Buffers, /) -> Callable[[], object] | None:
        """Takes regions [first, first + len(buffers)) from `buffers`, which are not to be written.

        Returns:
            None, and the buffers are not looked at any more; or what waits until that is so: the transport calls it
            before it uses them for other bytes.
        """


class Transport(Protocol):
    """How chunk bytes travel. Thread-safe."""

    name: str
    one_sided: bool
    """Whether bytes of a write that itself failed, or was given up, may still arrive: its ticket has to expire then."""

    in_place: bool
    """Whether it sends bytes from where a `fill` says that they lie."""

    @property
    def memory(self) -> npt.NDArray[np.uint8] | None:
        """The memory that all buffers given to callbacks lie in, where that is the pool's own; else None."""

    def write(
        self,
        ticket_id: int,
        offsets: Sequence[int],
        region_bytes: int,
        fill: Fill,
        batch_bytes: int,
        timeout_s: float,
        permit: bytes = b"",
    ) -> None:
        """Brings bytes into the regions of a ticket.

        Args:
            permit: as the server gave it with these regions; for transports that have to show it.

        Raises:
            TransferError, PoolTimeoutError, UnavailableError, LeaseExpiredError.
        """

    def read(
        self,
        lease_id: int,
        offsets: Sequence[int],
        region_bytes: int,
        drain: Drain,
        batch_bytes: int,
        timeout_s: float,
        permit: bytes = b"",
    ) -> None:
        """Brings the bytes of leased regions to the caller. Raises as `write` does."""

    def close(self) -> None:
        """Ends the transport. Idempotent."""


def batches(num_regions: int, region_bytes: int, batch_bytes: int) -> list[tuple[int, int]]:
    """Cuts regions into batches [start, stop) of at most `batch_bytes`, at least one region each."""
    step = max(1, batch_bytes // max(1, region_bytes))
    return [(start, min(start + step, num_regions)) for start in range(0, num_regions, step)]


Clock = Callable[[], float]
