"""`kvpool audit`: prints a server's audit log, and follows it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from kvpool.errors import ConfigError
from kvpool.holdings import printable
from kvpool.option_bounds import within

POLL_S = 0.2
_FIRST = ("time", "outcome", "call", "caller", "peer")


def follow(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The server's --audit-log.")],
    goes_on: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as the log grows, also after it was rotated, until Ctrl-C.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(callback=within(0), help="Follow the log for so many seconds, and end.")
    ] = None,
    refused: Annotated[bool, typer.Option("--refused", help="Only calls that were refused.")] = False,
) -> None:
    """Print the audit log and end; with --follow, or for --seconds, go on as it grows."""
    length_s = seconds if seconds is not None else math.inf if goes_on else 0.0
    for line in _lines(path, time.monotonic() + length_s):
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # A line that a crash has cut off.
        if isinstance(entry, dict) and not (refused and entry.get("outcome") == "OK"):
            typer.echo(_text(entry))


def _text(entry: dict[str, Any]) -> str:
    named = [str(entry.get(name) or "-") for name in _FIRST]
    rest = [f"{name}={value}" for name, value in entry.items() if name not in _FIRST]
    return printable("  ".join([*named, *rest]))


def _lines(path: Path, ends_at: float) -> Iterator[str]:
    """The lines of a file, and until `ends_at` those that come and those of the files that take its place.

    Raises ConfigError if it cannot be read.
    """
    file, rest = _opened(path), ""
    if file is None:
        raise ConfigError(f"cannot read {path}: there is no such file; give the server's --audit-log")
    while True:
        with file:
            inode = os.fstat(file.fileno()).st_ino
            while True:
                if piece := file.readline():
                    rest += piece
                    if rest.endswith("\n"):
                        yield rest
                        rest = ""
                elif time.monotonic() >= ends_at:
                    return
                elif _inode(path) not in (inode, None):
                    break  # Another file has taken its place.
                else:
                    time.sleep(POLL_S)
        rest = ""
        while (file := _opened(path)) is None:  # Moved away since: the server makes it anew with its next line.
            if time.monotonic() > ends_at:
                return
            time.sleep(POLL_S)


def _opened(path: Path) -> TextIO | None:
    """The file; None if there is none. Raises ConfigError if it cannot be read."""
    try:
        return path.open(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the server's --audit-log") from None


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
