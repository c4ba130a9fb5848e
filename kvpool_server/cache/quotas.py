"""Quotas: upper bounds on the bytes of the arena that the entries of a tenant or of a namespace hold.

The slots of live entries count, also while they are being written. Quarantined slots do not count: no lookup finds
them, and their owner cannot free them any sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.errors import InvalidRequestError
from kvpool.types import Quota
from kvpool_server.cache.entry import Group

_NAMESPACE = "namespace:"


@dataclass(eq=False, slots=True)
class Account:
    """A subject with a quota, and the groups whose entries count."""

    subject: str
    limit_bytes: int
    groups: set[Group] = field(default_factory=set)

    @property
    def used_bytes(self) -> int:
        return sum(group.nbytes for group in self.groups)


class Quotas:
    """The quotas in force, by subject."""

    def __init__(self, max_quotas: int):
        self._max_quotas = max_quotas
        self._by_subject: dict[str, Account] = {}
        self._prefix_digits: set[int] = set()

    def accounts(self) -> list[Account]:
        """By subject."""
        return sorted(self._by_subject.values(), key=lambda account: account.subject)

    def covering(self, tenant: str, fingerprint: bytes) -> tuple[Account, ...]:
        """The accounts that cover a namespace: its tenant's, its own, both or none, by subject."""
        name = fingerprint.hex()
        subjects = {f"tenant:{tenant}", *(f"{_NAMESPACE}{name[:digits]}" for digits in self._prefix_digits)}
        return tuple(self._by_subject[subject] for subject in sorted(subjects & self._by_subject.keys()))

    def set(self, quotas: Sequence[Quota]) -> None:
        """Sets quotas, and deletes those whose limit is 0 bytes.

        Raises:
            InvalidRequestError: a subject is malformed, is named twice, or has no quota to delete, or there are too
                many quotas; nothing has changed.
        """
        limits = {account.subject: account.limit_bytes for account in self.accounts()}
        named: set[str] = set()
        for quota in quotas:
            quota.check()
            if quota.subject in named:
                raise InvalidRequestError(f"quota {quota.subject} is given twice; give each subject once")
            named.add(quota.subject)
            if quota.limit_bytes:
                limits[quota.subject] = quota.limit_bytes
            elif limits.pop(quota.subject, None) is None:
                raise InvalidRequestError(f"there is no quota {quota.subject} to delete; `kvpool quota` lists all")
        if len(limits) > self._max_quotas:
            raise InvalidRequestError(
                f"{len(limits)} quotas are more than the limit of {self._max_quotas}; delete some first"
            )
        for subject in self._by_subject.keys() - limits.keys():
            del self._by_subject[subject]
        for subject, limit_bytes in limits.items():
            self._by_subject.setdefault(subject, Account(subject, limit_bytes)).limit_bytes = limit_bytes
        prefixes = [subject for subject in self._by_subject if subject.startswith(_NAMESPACE)]
        self._prefix_digits = {len(subject) - len(_NAMESPACE) for subject in prefixes}

    def usage(self) -> list[Quota]:
        """Every quota with the bytes in use, by subject."""
        return [Quota(account.subject, account.limit_bytes, account.used_bytes) for account in self.accounts()]
