"""Directories of servers that have gone, removed by whoever notices; and never anything else.

Whose lock has not been touched for long is looked at: it is a server's directory if nothing lies in it but what a
server puts there, and its journal begins as a journal does. It is locked, looked at again, and renamed, so that who
starts meanwhile finds either all of it or nothing; then its files go one by one. Who is interrupted leaves the renamed
directory for the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from pathlib import Path

from kvpool_server.tiers.file import journal
from kvpool_server.tiers.file.lock import FILE_NAME as LOCK_NAME
from kvpool_server.tiers.file.lock import DirectoryLock

ORPHANED_S = 3_600.0
"""Without a sign of life for so long a directory is nobody's. Longer than a restart takes, also one with mishaps."""
REMOVED_PREFIX = ".removed-"
"""Of the names of directories that are being removed. No server's own name begins with a dot."""

_OURS = re.compile(r"lock|journal|journal\.new|extent-\d{5,}")


def is_orphaned(directory: Path) -> bool:
    """Has its owner given no sign of life for long? Raises OSError, FileNotFoundError where there is no lock."""
    return time.time() - (directory / LOCK_NAME).stat().st_mtime > ORPHANED_S


def is_of_a_server(directory: Path) -> bool:
    """Does nothing lie there but what a server puts there? Raises OSError."""
    with os.scandir(directory) as entries:
        if not all(_OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) for entry in entries):
            return False
    with contextlib.suppress(FileNotFoundError):
        if (directory / LOCK_NAME).stat().st_size:
            return False
    return journal.is_one_or_none(directory / journal.FILE_NAME)


def remove(directory: Path) -> bool:
    """Removes an orphan; False if it is none, or not a server's.

    Raises:
        BlockingIOError: its owner lives, and could not say so: a clock is wrong, or its disk is full.
        OSError: something cannot be read or removed.
    """
    if directory.is_symlink() or not is_of_a_server(directory):
        return False
    with contextlib.closing(DirectoryLock(directory, is_owner=False)):
        if not is_orphaned(directory):
            return False  # Its owner has come back, and gone again, since somebody looked.
        aside = directory.with_name(f"{REMOVED_PREFIX}{directory.name}-{secrets.token_hex(8)}")
        directory.rename(aside)
    finish(aside)
    return True


def finish(aside: Path) -> None:
    """Deletes a directory that was renamed to be removed. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):  # Another server finishes it, too.
        if not aside.is_symlink() and is_of_a_server(aside):
            for path in sorted(aside.iterdir()):  # The journal and the lock last.
                path.unlink(missing_ok=True)
            aside.rmdir()
