"""Reads TOML files of settings."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError


def read_toml(path: Path, name: str, fix: str) -> dict[str, Any]:
    """The keys of a file. Raises ConfigError if the file cannot be read, or is not TOML.

    Args:
        name: of the file, for errors.
        fix: what to do about a file that cannot be read.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}; {fix}") from None
    except ValueError as error:  # Not UTF-8, or not TOML.
        raise ConfigError(f"{name} is not TOML: {error}") from None


def place_of(path: Path, *names: str) -> str:
    """The file and, if it is found, the line of a key, for errors: the parser tells no lines of keys that it has read.

    Args:
        names: the table, if the key is in one, and the key.
    """
    try:
        lines = list(enumerate(path.read_text().splitlines(), 1))
    except (OSError, ValueError):  # Replaced since it was parsed.
        return str(path)
    number = 1
    for name in names:
        key = re.compile(rf"(?<![\w-]){re.escape(name)}[\"']?\s*[=.\]]")
        number = next((nth for nth, line in lines[number - 1 :] if key.search(line.partition("#")[0])), 0)
        if not number:
            return str(path)
    return f"{path}, line {number}"
