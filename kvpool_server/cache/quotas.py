"""Quotas: upper bounds on the bytes of the arena that a tenant's or a namespace's entries hold.

What counts is the slots of live entries, those that are being written among them. Quarantined slots do not count: they
are out of the index, nobody can keep them for long, and their owner cannot give them up any sooner.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.errors import InvalidRequestError
from kvpool.types import Quota
from kvpool_server.cache.entry import Group


class Account:
    """A subject with a quota.

    Attributes:
        groups: all whose entries count.
    """

    __slots__ = ("groups", "limit_bytes", "subject")

    def __init__(self, subject: str, limit_bytes: int):
        self.subject = subject
        self.limit_bytes = limit_bytes
        self.groups: set[Group] = set()

    @property
    def used_bytes(self) -> int:
        return sum(group.nbytes for group in self.groups)


class Accounts:
    """All subjects with quotas.

    Args:
        max_quotas: so many at once.
    """

    def __init__(self, max_quotas: int):
        self._max_quotas = max_quotas
        self._by_subject: dict[str, Account] = {}

    def values(self) -> list[Account]:
        """By subject."""
        return sorted(self._by_subject.values(), key=lambda account: account.subject)

    def of(self, tenant: str, fingerprint: bytes) -> tuple[Account, ...]:
        """Those that cover a namespace, by subject: none, or its tenant's, its own, or both."""
        return tuple(account for account in self.values() if Quota(account.subject, 0).covers(tenant, fingerprint))

    def set(self, quotas: Sequence[Quota]) -> None:
        """Sets bounds, and takes those of 0 bytes away.

        Raises:
            InvalidRequestError: a subject is none, is named twice or has no quota to take away, or there are too many;
                nothing changed.
        """
        wanted = {account.subject: account.limit_bytes for account in self.values()}
        for nth, quota in enumerate(quotas):
            quota.check()
            if any(other.subject == quota.subject for other in quotas[:nth]):
                raise InvalidRequestError(f"quota {quota.subject} is there twice; give each subject once")
            if quota.limit_bytes:
                wanted[quota.subject] = quota.limit_bytes
            elif wanted.pop(quota.subject, None) is None:
                raise InvalidRequestError(f"there is no quota {quota.subject} to take away; `kvpool quota` lists all")
        if len(wanted) > self._max_quotas:
            raise InvalidRequestError(f"{len(wanted)} quotas; there may be {self._max_quotas}, so take some away")
        for subject in self._by_subject.keys() - wanted.keys():
            del self._by_subject[subject]
        for subject, limit_bytes in wanted.items():
            self._by_subject.setdefault(subject, Account(subject, limit_bytes)).limit_bytes = limit_bytes

    def quotas(self) -> list[Quota]:
        """As they are now, by subject."""
        return [Quota(account.subject, account.limit_bytes, account.used_bytes) for account in self.values()]
