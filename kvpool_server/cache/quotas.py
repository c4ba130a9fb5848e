"""Quotas: upper bounds on the bytes of the arena that a tenant or a namespace holds.

All slots of its entries count, from their allocation until they are free: also while they are being written, and in
quarantine. Where extents belong to tenants, a tenant's whole extents count, because nobody else can use the rest of
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.text import size_text
from kvpool.protocol.types import Quota
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.eviction.partitions import Account

_NAMESPACE = "namespace:"
_TENANT = "tenant:"


class Quotas:
    """The quotas in force, by subject."""

    def __init__(self, max_quotas: int, arena: Arena):
        self._max_quotas = max_quotas
        self._arena = arena
        self._by_subject: dict[str, Account] = {}
        self._prefix_digits: set[int] = set()

    def accounts(self) -> list[Account]:
        return sorted(self._by_subject.values(), key=lambda account: account.subject)

    def covering(self, tenant: str, fingerprint: bytes) -> tuple[Account, ...]:
        """The accounts that cover a namespace: its tenant's, its own, both or none, by subject."""
        name = fingerprint.hex()
        subjects = {f"{_TENANT}{tenant}", *(f"{_NAMESPACE}{name[:digits]}" for digits in self._prefix_digits)}
        return tuple(self._by_subject[subject] for subject in sorted(subjects & self._by_subject.keys()))

    def set(self, quotas: Sequence[Quota]) -> None:
        """Sets quotas, and deletes those whose limit is 0 bytes. Where a tenant's whole extents count, the limit in
        force is a whole number of them: a limit that nobody can reach would look like room that is left.

        Raises:
            InvalidRequestError: a subject is malformed, is named twice, or has no quota to delete, or there are too
                many quotas, or a tenant's quota is less than an extent that it would hold; nothing has changed.
        """
        limits = {account.subject: account.limit_bytes for account in self.accounts()}
        named: set[str] = set()
        for quota in quotas:
            quota.check()
            if quota.subject in named:
                raise InvalidRequestError(f"quota {quota.subject} is given twice; give each subject once")
            named.add(quota.subject)
            if quota.limit_bytes:
                least = self._arena.extent_bytes if self._tenant(quota.subject) is not None else 1
                if quota.limit_bytes < least:
                    raise InvalidRequestError(
                        f"quota {quota.subject} = {quota.limit_bytes} bytes is less than an extent of the arena, the "
                        f"least that a tenant can hold; give at least {least} ({size_text(least)})"
                    )
                limits[quota.subject] = quota.limit_bytes // least * least
            elif limits.pop(quota.subject, None) is None:
                raise InvalidRequestError(f"there is no quota {quota.subject} to delete; `kvpool quota` lists all")
        if len(limits) > self._max_quotas:
            raise InvalidRequestError(
                f"{len(limits)} quotas are more than the limit of {self._max_quotas}; delete some first"
            )
        for subject in self._by_subject.keys() - limits.keys():
            del self._by_subject[subject]
        for subject, limit_bytes in limits.items():
            account = self._by_subject.setdefault(subject, Account(subject, limit_bytes, self._tenant(subject)))
            account.limit_bytes = limit_bytes
        tenants = [(each.tenant, each.limit_bytes) for each in self._by_subject.values() if each.tenant is not None]
        self._arena.limits = {tenant: nbytes // self._arena.extent_bytes for tenant, nbytes in tenants}
        prefixes = [subject for subject in self._by_subject if subject.startswith(_NAMESPACE)]
        self._prefix_digits = {len(subject) - len(_NAMESPACE) for subject in prefixes}

    def _tenant(self, subject: str) -> str | None:
        """Whose extents count towards a subject's quota; None: slots do."""
        is_tenant = self._arena.has_tenants and subject.startswith(_TENANT)
        return subject.removeprefix(_TENANT) if is_tenant else None

    def usage(self) -> list[Quota]:
        return [Quota(account.subject, account.limit_bytes, self._used_bytes(account)) for account in self.accounts()]

    def _used_bytes(self, account: Account) -> int:
        if account.tenant is None:
            return account.slots_bytes
        return self._arena.num_held(account.tenant) * self._arena.extent_bytes
