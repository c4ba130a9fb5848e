"""What a transport is: how bytes get from a caller's buffers to regions of the arena, and back.

A caller gives its bytes in one of two ways. Where they lie in arrays (`rows`), the transport sends from there and
receives into them, on as many threads as pay. Else it calls back with buffers to fill or to drain, one batch of regions
at a time on the caller's thread: with shared memory these are the regions themselves if the caller sums, and the
network carries some batches while the caller fills or drains others.

Invariants of every transport (tests/contracts asserts them):
- `fill` and `drain` see every region once, in order, with buffers of exactly `region_bytes`.
- `sum` sees every region once, in any order and from any thread, when its bytes are there, and before they may change.
- An exception in a callback ends the transfer and reaches the caller unchanged. After an exception in `fill`, the
  transport first waits until no byte of the write is in flight. If that wait fails, the transport raises its own error
  from the callback's.
- A call returns or raises within its `timeout_s`, apart from the time spent in callbacks; out of process within two
  seconds more, if the process hangs. Then no thread of the transport touches the caller's arrays, nor calls back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.protocol.errors import TransferError

Bytes = npt.NDArray[np.uint8]
Buffers = Sequence[Bytes]
Pieces = Sequence[Bytes]
"""One region's bytes, in order: uint8 arrays, contiguous each, of the region's size together."""
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
        out_of_process: whether others in this process need its interpreter meanwhile: another process moves the bytes
            of callbacks, and of rows that it maps, where the transport has one.
        skip_bytes: where in each region they begin: a rank moves some shards of whole slots that were granted.
        permitted_bytes: size of each region that was granted; 0: `region_bytes`.
        permitted_offsets: of all regions that were granted, where only some of them move; None: `offsets`.
        first_permitted: index of the first that moves; the others are its neighbours.
    """

    holding_id: int
    offsets: Sequence[int]
    region_bytes: int
    timeout_s: float
    batch_bytes: int = BATCH_BYTES
    permit: bytes = b""
    out_of_process: bool = False
    skip_bytes: int = 0
    permitted_bytes: int = 0
    permitted_offsets: npt.NDArray[np.uint64] | None = None
    first_permitted: int = 0

    def starts(self, first: int = 0, stop: int | None = None) -> Sequence[int]:
        """Arena offset of the bytes that move, of each of regions [first, stop)."""
        offsets = self.offsets[first:stop]
        return [offset + self.skip_bytes for offset in offsets] if self.skip_bytes else offsets

    @property
    def batch_regions(self) -> int:
        return min(len(self.offsets), max(1, self.batch_bytes // max(1, self.region_bytes)))

    def batches(self) -> list[tuple[int, int]]:
        """The regions as batches [start, stop), in order."""
        count, step = len(self.offsets), self.batch_regions
        return [(start, min(start + step, count)) for start in range(0, count, step or 1)]

    def check_bounds(self, arena_bytes: int) -> None:
        """Raises TransferError unless every region ends within the arena."""
        end = max(self.starts(), default=-self.region_bytes) + self.region_bytes
        if end > arena_bytes:
            raise TransferError(f"a region ends at {end}, beyond the arena's {arena_bytes} bytes")


Wait = Callable[[], object]
Act = Callable[[int, Buffers], Wait | None]
"""The callback of a transfer, for regions [first, first + len(buffers)), each uint8 [region_bytes].

Of a write (`fill`): writes the regions into `buffers`. Returns None if the bytes are there. Otherwise a function that
waits until they are. The transport calls it before it reads the buffers, on any of its threads; of shared memory that
need not be summed nobody reads them, and it is not called.

Of a read (`drain`): reads the regions from `buffers`, and does not write there. Returns None if the callback no longer
needs the buffers. Otherwise a function that waits until they are no longer needed: the transport calls it before it
reuses them.
"""
Sum = Callable[[int, Sequence[Pieces]], None]
"""Reads regions [first, first + len(regions)), and computes their checksums. Thread-safe."""


def no_sum(first: int, regions: Sequence[Pieces]) -> None:
    """For transfers whose checksums nobody needs."""


@dataclass(frozen=True, slots=True)
class Local:
    """The caller's bytes: where a write takes them and a read puts them, in `rows`, one a region, or by `act`.

    Args:
        apart: of a TCP peer and a transfer, reads into the rows and computes checksums in another process, and `sum`
            does not see the rows; False, and nothing is done, if no process takes the transfer.
    """

    act: Act | None = None
    rows: Sequence[Pieces] | None = None
    sum: Sum = no_sum
    apart: Callable[..., bool] | None = None

    def acting(self, *, is_write: bool) -> Act:
        """`act`, or a callback that copies from or into `rows`."""
        if self.act is not None:
            return self.act
        rows = self.rows
        assert rows is not None

        def copy(first: int, buffers: Buffers) -> None:
            for buffer, pieces in zip(buffers, rows[first:], strict=False):
                copy_pieces(pieces, buffer, is_write=is_write)

        return copy


def call_back(act: Act, sum: Sum, first: int, buffers: Buffers, *, is_write: bool) -> None:
    """Has a callback fill or drain buffers, waits until that is done, and sums what was filled or is to be drained."""
    regions = [[buffer] for buffer in buffers]
    if not is_write:
        sum(first, regions)
    if (wait := act(first, buffers)) is not None:
        wait()
    if is_write:
        sum(first, regions)


def copy_pieces(pieces: Pieces, region: Bytes, *, is_write: bool) -> None:
    """Copies pieces into a region of their size together, or the region into the pieces."""
    at = 0
    for piece in pieces:
        part = region[at : at + len(piece)]
        if is_write:
            part[:] = piece
        else:
            piece[:] = part
        at += len(piece)


class Transport(Protocol):
    """How chunk bytes travel. Thread-safe."""

    name: str
    """As in `ClientConfig.transport`."""

    one_sided: bool
    """Whether bytes of a failed or abandoned write may arrive after its ticket was revoked: it then has to expire."""

    @property
    def memory(self) -> Bytes | None:
        """Memory in which the buffers of callbacks lie as long as the transport lives, worth pinning for a device: the
        pool's own, or what bytes pass through. None if buffers come and go."""

    def write(self, transfer: Transfer, local: Local) -> None:
        """Writes a ticket's regions. Raises TransferError, PoolTimeoutError, UnavailableError and LeaseExpiredError."""

    def read(self, transfer: Transfer, local: Local) -> None:
        """Reads leased regions. Raises as `write` does."""

    def close(self) -> None:
        """Ends the transport. Idempotent."""
