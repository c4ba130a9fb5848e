"""Why a put gets no slots: the errors, which name what is full, what holds it, and what to do."""

from __future__ import annotations

from kvpool.protocol.errors import OutOfSpaceError
from kvpool.report.quotas import size_text
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.eviction.partitions import Account


class NoRoomError(OutOfSpaceError):
    """Too few slots can be freed for a put that the arena or quota has room for; the pool adds what holds the others.

    Args:
        what: was wanted.
        elsewhere: which part of the arena cannot be used, and why; empty if none.
        fix: what to do.
        account: whose quota is exceeded; None: the arena is full.
    """

    def __init__(self, what: str, elsewhere: str, fix: str, account: Account | None = None):
        super().__init__(f"{what}; {fix}")
        self._what, self._elsewhere, self._fix = what, elsewhere, fix
        self.account = account

    def because(self, holders: str) -> OutOfSpaceError:
        """The whole message, given a description of what holds slots."""
        reasons = "; ".join(filter(None, (holders, self._elsewhere)))
        return OutOfSpaceError(f"{self._what}: {reasons}; {self._fix}" if reasons else str(self))


def over_quota(account: Account, slot_bytes: int, count: int, arena: Arena | None = None) -> OutOfSpaceError:
    """The error of a put beyond a quota; with an arena, of one that counts extents."""
    quota = f"quota {account.subject} = {account.limit_bytes} bytes"
    raise_it = f"raise it (`kvpool quota {account.subject}=SIZE`)"
    if slot_bytes > account.limit_bytes:
        return OutOfSpaceError(f"{quota}: a block of {slot_bytes} bytes is larger; {raise_it}")
    fits = account.limit_bytes // slot_bytes
    if arena is not None:
        fits = account.limit_bytes // arena.extent_bytes * arena.slots_per_extent(slot_bytes)
        quota += f", {account.limit_bytes // arena.extent_bytes} extents of {size_text(arena.extent_bytes)}"
    if count > fits:
        return OutOfSpaceError(
            f"{quota}: {count} blocks of {slot_bytes} bytes are more; put fewer at once, or {raise_it}"
        )
    what = f"{quota}: no room for {count} blocks of {slot_bytes} bytes"
    return NoRoomError(what, "", f"try again later, or {raise_it}", account)
