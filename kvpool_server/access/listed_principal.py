"""Principals that the deny list and the limits of identities name."""

from __future__ import annotations

import dataclasses

from kvpool.protocol.errors import InvalidRequestError
from kvpool.security.principal import Principal


def listed_principal(spiffe_id: str, domain: str | None) -> Principal:
    """The principal that an operator has named.

    Args:
        domain: the trust domain of all callers; None: callers may be of any.

    Raises InvalidRequestError if no caller can be that principal: the entry would have no effect.
    """
    found = Principal.parse(spiffe_id)
    if domain is not None and found.domain != domain:
        raise InvalidRequestError(
            f"{spiffe_id!r} can be no caller: this server's callers are of trust domain {domain}; give "
            f"{dataclasses.replace(found, domain=domain)}"
        )
    return found
