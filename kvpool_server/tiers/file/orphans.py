"""Directories of servers that have gone: `kvpool tier gc` lists and deletes them, and never anything else.

A directory is a candidate for deletion if it holds nothing but a server's files, its lock is free, and its last
heartbeat is old: on some network file systems a lock ends at its host, and only the heartbeat is seen elsewhere.
Deletion locks the directory, checks again, and renames it, so that a server that starts meanwhile finds either all of
the directory or none; then the files are deleted one by one. An interrupted deletion leaves the renamed directory,
which is a candidate, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from kvpool.holdings import duration_text
from kvpool_server.tiers.file import journal
from kvpool_server.tiers.file.frames import is_journal_or_empty
from kvpool_server.tiers.file.own_directory import FILE_NAME as LOCK_NAME
from kvpool_server.tiers.file.own_directory import DirectoryLock, heartbeat_age_s

MIN_AGE_S = 3_600.0
"""Default age of a candidate's last heartbeat: longer than a restart takes, also one with mishaps."""
DELETED_PREFIX = ".removed-"
"""Begins the name of a directory that is being deleted. No server's name begins with a dot."""

_SERVER_FILE = re.compile(r"lock|journal|journal\.new|extent-\d{5,}")


@dataclass(frozen=True, slots=True)
class Survey:
    """One directory below a tier's path.

    Args:
        age_s: seconds since its server's last heartbeat; None if there is no lock file.
        nbytes: disk space of its files.
        is_candidate: whether `delete` would delete it.
        reason: why it is a candidate, or why not.
    """

    directory: Path
    age_s: float | None
    nbytes: int
    is_candidate: bool
    reason: str


def survey(root: Path, min_age_s: float = MIN_AGE_S) -> list[Survey]:
    """The directories below a tier's path, by name. Raises OSError if the path cannot be read."""
    return [_survey_one(path, min_age_s) for path in sorted(root.iterdir()) if path.is_dir()]


def _survey_one(directory: Path, min_age_s: float) -> Survey:
    age_s, nbytes = None, 0
    try:
        nbytes = sum(path.lstat().st_blocks * 512 for path in directory.iterdir())
        if not is_a_servers(directory):
            return Survey(directory, age_s, nbytes, False, "not a server's directory")
        if directory.name.startswith(DELETED_PREFIX):
            return Survey(directory, age_s, nbytes, True, "its deletion was interrupted")
        age_s = heartbeat_age_s(directory)
        DirectoryLock(directory, is_owner=False).close()
    except BlockingIOError:
        return Survey(directory, age_s, nbytes, False, "a running server holds its lock")
    except FileNotFoundError:
        return Survey(directory, age_s, nbytes, False, "it has no lock file")
    except OSError as error:
        return Survey(directory, age_s, nbytes, False, f"it cannot be checked: {error.strerror}")
    if age_s < min_age_s:
        return Survey(directory, age_s, nbytes, False, f"its last heartbeat is younger than {duration_text(min_age_s)}")
    return Survey(directory, age_s, nbytes, True, "no server holds its lock")


def is_a_servers(directory: Path) -> bool:
    """True if the directory is no link, and holds nothing but what a server puts there. Raises OSError."""
    if directory.is_symlink():
        return False
    with os.scandir(directory) as entries:
        if not all(_SERVER_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) for entry in entries):
            return False
    with contextlib.suppress(FileNotFoundError):
        if (directory / LOCK_NAME).stat().st_size:
            return False
    return is_journal_or_empty(directory / journal.FILE_NAME)


def delete(directory: Path, min_age_s: float = MIN_AGE_S) -> bool:
    """Deletes a candidate; False if the directory is none, or none any more.

    Raises:
        BlockingIOError: a running server holds the lock.
        OSError: something cannot be read or deleted.
    """
    if not is_a_servers(directory):
        return False
    aside = directory
    if not directory.name.startswith(DELETED_PREFIX):
        with contextlib.closing(DirectoryLock(directory, is_owner=False)):
            if heartbeat_age_s(directory) < min_age_s:
                return False  # Its server has come back, and stopped, since the survey.
            aside = directory.with_name(f"{DELETED_PREFIX}{directory.name}-{secrets.token_hex(8)}")
            directory.rename(aside)
    with contextlib.suppress(FileNotFoundError):  # Another command deletes it at the same time.
        for path in sorted(aside.iterdir()):  # The journal and the lock last.
            path.unlink(missing_ok=True)
        aside.rmdir()
    return True
