"""What each identity may have at once, from a file that is read again when it changes.

The file is TOML. Its first lines are the limits of all identities; a table named by a SPIFFE ID has those of one:

    leases = 2_000

    ["spiffe://kvpool.local/kvpool/acme/engine-write"]
    leases = 8_000

A name that can match nothing is an error: an operator who has misspelt it must not believe that a limit is in force.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError, InvalidRequestError
from kvpool.file_permissions import require_owner_writes
from kvpool.watched_files import WatchedFiles
from kvpool_server.access.listed_principal import listed_principal
from kvpool_server.cache.limits import IdentityLimits
from kvpool_server.toml_file import place_of, read_toml

MOST = 1 << 32
_FIELDS = tuple(field.name for field in dataclasses.fields(IdentityLimits))


class IdentityLimitsFile(WatchedFiles[tuple[IdentityLimits, dict[str, IdentityLimits]]]):
    """The limits of all identities, and of those that have their own. Raises ConfigError as `read_limits`.

    Args:
        domain: as of `read_limits`.
    """

    def __init__(
        self, path: str, when_read: Callable[[ConfigError | None], None] = lambda _: None, domain: str | None = None
    ):
        super().__init__([path], lambda: read_limits(Path(path), domain), when_read=when_read)

    def of(self, name: str) -> IdentityLimits:
        """The limits of an identity, by its SPIFFE ID."""
        of_all, of_each = self.value
        return of_each.get(name, of_all)


def read_limits(path: Path, domain: str | None = None) -> tuple[IdentityLimits, dict[str, IdentityLimits]]:
    """The limits of all identities, and of those that have their own.

    Args:
        domain: the trust domain of all callers; None: callers may be of any.

    Raises ConfigError, which names the line and the key, also for a file that its group or others can write.
    """
    require_owner_writes(str(path), "raise their own limits", "--identity-limits")
    values = read_toml(path, str(path), "see --identity-limits")
    tables = {name: value for name, value in values.items() if isinstance(value, dict)}
    of_all = _changed(IdentityLimits(), {name: values[name] for name in values.keys() - tables.keys()}, path)
    of_each = {}
    for name, table in tables.items():
        try:
            listed_principal(name, domain)
        except InvalidRequestError as error:
            raise ConfigError(f"{place_of(path, name)}: {error}") from None
        of_each[name] = _changed(of_all, table, path, name)
    return of_all, of_each


def _changed(limits: IdentityLimits, values: dict[str, Any], path: Path, *table: str) -> IdentityLimits:
    for name, value in values.items():
        fault = ""
        if name not in _FIELDS:
            fault = f"unknown limit {name}; the limits are {', '.join(_FIELDS)}"
        elif type(value) is not int or not 1 <= value <= MOST:
            fault = f"{name} = {value!r}; give a whole number, 1 to {MOST}"
        if fault:
            raise ConfigError(f"{', '.join([place_of(path, *table, name), *table])}: {fault}")
    return dataclasses.replace(limits, **values)
