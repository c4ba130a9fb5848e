"""What each identity may have at once, from a file that is read again when it changes.

The file is TOML. Its first lines are the limits of all identities; a table named by a SPIFFE ID has those of one:

    leases = 2_000

    ["spiffe://kvpool.local/kvpool/acme/engine-write"]
    leases = 8_000
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError, InvalidRequestError
from kvpool.principal import Principal
from kvpool.watched_files import WatchedFiles
from kvpool_server.cache.limits import IdentityLimits

MOST = 1 << 32
_FIELDS = tuple(field.name for field in dataclasses.fields(IdentityLimits))


class IdentityLimitsFile:
    """The limits that a file sets. Raises ConfigError if it cannot be used at first.

    While a changed file cannot be used, what it held before stays in force.
    """

    def __init__(self, path: str):
        self._file = WatchedFiles([path], lambda: read_limits(Path(path)))

    def __call__(self, name: str) -> IdentityLimits:
        """The limits of an identity, by its SPIFFE ID."""
        self._file.look()
        of_all, of_each = self._file.value
        return of_each.get(name, of_all)


def read_limits(path: Path) -> tuple[IdentityLimits, dict[str, IdentityLimits]]:
    """The limits of all identities, and of those that have their own. Raises ConfigError, which names the key."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; see --identity-limits") from None
    except ValueError as error:  # Not UTF-8, or not TOML.
        raise ConfigError(f"{path} is not TOML: {error}") from None
    tables = {name: value for name, value in values.items() if isinstance(value, dict)}
    of_all = _changed(IdentityLimits(), {name: values[name] for name in values.keys() - tables.keys()}, str(path))
    of_each = {}
    for name, table in tables.items():
        try:
            Principal.parse(name)
        except InvalidRequestError as error:
            raise ConfigError(f"{path}: {error}") from None
        of_each[name] = _changed(of_all, table, f"{path}, {name}")
    return of_all, of_each


def _changed(limits: IdentityLimits, values: dict[str, Any], where: str) -> IdentityLimits:
    for name, value in values.items():
        if name not in _FIELDS:
            raise ConfigError(f"{where}: unknown limit {name}; the limits are {', '.join(_FIELDS)}")
        if type(value) is not int or not 1 <= value <= MOST:
            raise ConfigError(f"{where}: {name} = {value!r}; give a whole number, 1 to {MOST}")
    return dataclasses.replace(limits, **values)
