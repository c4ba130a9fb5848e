"""What each identity may have at once, from the option --limit.

`leases=2000` sets a limit of all identities, and `spiffe://kvpool.local/kvpool/acme/engine-write,leases=8000` one of a
single identity. A name that can match nothing is an error: an operator who has misspelt it must not believe that a
limit is in force.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kvpool.protocol.errors import ConfigError, InvalidRequestError
from kvpool_server.access.credential import listed_principal
from kvpool_server.cache.limits import IdentityLimits

MOST = 1 << 32
_FIELDS = tuple(field.name for field in dataclasses.fields(IdentityLimits))


def identity_limits(texts: Sequence[str], domain: str | None) -> Callable[[str], IdentityLimits]:
    """The limits of an identity, by its SPIFFE ID.

    Args:
        texts: as given to --limit.
        domain: the trust domain of all callers; None: callers may be of any.

    Raises ConfigError, which quotes the option.
    """
    given: dict[str, dict[str, int]] = {"": {}}
    for text in texts:
        try:
            name, limits = _parse(text, domain)
        except InvalidRequestError as error:
            raise ConfigError(f"--limit {text}: {error}") from None
        if given.get(name):
            raise ConfigError(
                f"--limit {text}: {name or 'all identities'} have limits already; give them in one option"
            )
        given[name] = limits
    of_all = IdentityLimits(**given.pop(""))
    of_each = {name: dataclasses.replace(of_all, **limits) for name, limits in given.items()}
    return lambda name: of_each.get(name, of_all)


def _parse(text: str, domain: str | None) -> tuple[str, dict[str, int]]:
    """An identity, empty for all, and its limits. Raises InvalidRequestError."""
    name, *parts = text.split(",")
    if "=" in name:
        name, parts = "", [name, *parts]
    else:
        listed_principal(name, domain)
    limits = {}
    for part in parts:
        key, _, value = part.partition("=")
        if key not in _FIELDS:
            raise InvalidRequestError(f"unknown limit {key!r}; the limits are {', '.join(_FIELDS)}")
        if not value.isdecimal() or not 1 <= int(value) <= MOST:
            raise InvalidRequestError(f"{key}={value}; give a whole number, 1 to {MOST}")
        limits[key] = int(value)
    if not limits:
        raise InvalidRequestError("no limit; give at least one, such as leases=2000")
    return name, limits
