"""Quotas: how much of the arena a tenant, or a namespace, may hold."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.types import HASH_BYTES

MIN_PREFIX = 8
"""Fewest hexadecimal digits of a fingerprint in a quota: fewer could match another namespace by chance."""


@dataclass(frozen=True, slots=True)
class Quota:
    """An upper bound on what a tenant's or a namespace's entries hold of the arena.

    Args:
        subject: "tenant:NAME", or "namespace:" and a fingerprint in lower-case hexadecimal, or its first characters.
        limit_bytes: of their slots; 0 in `set_quotas` deletes the quota.
        used_bytes: of their slots now; ignored by `set_quotas`.
    """

    subject: str
    limit_bytes: int
    used_bytes: int = 0

    def check(self) -> None:
        """Raises InvalidRequestError unless the subject can be one."""
        kind, _, name = self.subject.partition(":")
        if kind not in ("tenant", "namespace") or not name:
            fix = "" if ":" in self.subject else f"; give tenant:{self.subject}"
            raise InvalidRequestError(
                f"quota subject {self.subject!r} is neither tenant:NAME nor namespace:FINGERPRINT{fix}"
            )
        hexadecimal = f"[0-9a-f]{{{MIN_PREFIX},{2 * HASH_BYTES}}}"
        if kind == "namespace" and not re.fullmatch(hexadecimal, name):
            raise InvalidRequestError(
                f"quota subject {self.subject!r}: give the first {MIN_PREFIX} characters of a fingerprint, or more, as "
                "`kvpool namespaces` shows them"
            )
