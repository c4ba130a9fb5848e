"""Reads TOML files of settings."""

from __future__ import annotations

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
