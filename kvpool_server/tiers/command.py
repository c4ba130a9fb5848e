"""`kvpool tier gc`: lists and deletes directories of servers that have gone, and never anything else.

A directory is a candidate for deletion if it holds nothing but a server's files, which nobody but their owner can
write, its lock is free, and its last heartbeat is old: on some network file systems a lock ends at its host, and only
the heartbeat is seen elsewhere. Deletion locks the directory, checks again, and renames it, so that a server that
starts meanwhile finds either all of the directory or none; then the files are deleted one by one. An interrupted
deletion leaves the renamed directory, which is a candidate, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpool.commands.common import within
from kvpool.protocol.text import duration_text, printable, size_text
from kvpool_server.tiers.file import journal
from kvpool_server.tiers.file.directory import LOCK_NAME, Directory, DirectoryLock, UntrustedFileError, heartbeat_age_s

MIN_AGE_S = 3_600.0
"""Default age of a candidate's last heartbeat: longer than a restart takes, also one with mishaps."""
DELETED_PREFIX = ".removed-"
"""Begins the name of a directory that is being deleted. No server's name begins with a dot."""
_NOT_A_SERVERS = "not a server's directory"
_SERVER_FILE = re.compile(r"lock|journal|journal\.new|extent-\d{5,}")

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Maintain the directories of file tiers.")


@app.callback()
def _group() -> None:
    """Maintain the directories of file tiers."""


@app.command("gc")
def collect_garbage(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="PATH of --tier file:PATH.", exists=True, file_okay=False)
    ],
    delete: Annotated[bool, typer.Option("--delete", help="Delete the candidates. Default: only list them.")] = False,
    min_age_s: Annotated[
        float, typer.Option(callback=within(60), help="Least age of a candidate's last heartbeat, seconds.")
    ] = MIN_AGE_S,
) -> None:
    """List, or delete, the directories of servers that have gone. Blocks in them can be read until then.

    A directory is a candidate if no server holds its lock, its server's last heartbeat is old, and nothing but a
    server's files lies in it.
    """
    try:
        surveys = survey(path, min_age_s)
    except OSError as error:
        typer.echo(f"kvpool tier gc: {error}", err=True)
        raise typer.Exit(1) from None
    table = Table("directory", "last heartbeat", "size", "candidate", "reason")
    for each in surveys:
        age = "-" if each.age_s is None else f"{duration_text(each.age_s)} ago"
        name = escape(printable(each.directory.name))
        table.add_row(name, age, size_text(each.nbytes), "yes" if each.is_candidate else "no", each.reason)
    Console().print(table)
    candidates = [each for each in surveys if each.is_candidate]
    total = f"{len(candidates)} of {len(surveys)} directories, {size_text(sum(each.nbytes for each in candidates))}"
    if not delete:
        typer.echo(f"candidates: {total}; nothing is deleted without --delete")
        return
    deleted = [_is_deleted(each.directory, min_age_s) for each in candidates]
    typer.echo(f"deleted {sum(deleted)} of {len(candidates)} candidates")
    if not all(deleted):
        raise typer.Exit(1)


def _is_deleted(directory: Path, min_age_s: float) -> bool:
    name = printable(directory)
    try:
        if delete_directory(directory, min_age_s):
            return True
        problem = f"{name} is in use again, and was not deleted"
    except BlockingIOError:
        problem = f"a server has locked {name} meanwhile; it was not deleted"
    except OSError as error:
        problem = f"{name} cannot be deleted: {error.strerror}"
    typer.echo(f"kvpool tier gc: {problem}", err=True)
    return False


@dataclass(frozen=True, slots=True)
class Survey:
    """One directory below a tier's path.

    Args:
        age_s: seconds since its server's last heartbeat; None if there is no lock file.
        is_candidate: whether `delete_directory` would delete it.
        reason: why it is a candidate, or why not.
    """

    directory: Path
    age_s: float | None
    nbytes: int
    is_candidate: bool
    reason: str


def survey(root: Path, min_age_s: float = MIN_AGE_S) -> list[Survey]:
    """The directories below a tier's path, by name. Raises OSError if the path cannot be read."""
    with contextlib.closing(Directory.open_root(root, None)) as opened:
        names = sorted(entry.name for entry in opened.entries() if entry.is_dir())
        return [_survey_one(opened, name, min_age_s) for name in names]


def _survey_one(root: Directory, name: str, min_age_s: float) -> Survey:
    age_s, nbytes, is_candidate = None, 0, False
    try:
        with contextlib.closing(root.open_directory(name)) as directory:
            nbytes = sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in directory.entries())
            if not _is_a_servers(directory):
                reason = _NOT_A_SERVERS
            elif name.startswith(DELETED_PREFIX):
                is_candidate, reason = True, "its deletion was interrupted"
            else:
                age_s = heartbeat_age_s(directory)
                DirectoryLock(directory, is_owner=False).close()
                is_candidate = age_s >= min_age_s
                young = f"its last heartbeat is younger than {duration_text(min_age_s)}"
                reason = "no server holds its lock" if is_candidate else young
    except UntrustedFileError:
        reason = _NOT_A_SERVERS
    except BlockingIOError:
        reason = "a running server holds its lock"
    except FileNotFoundError:
        reason = "it has no lock file"
    except OSError as error:
        reason = f"it cannot be checked: {error.strerror}"
    return Survey(root.path / name, age_s, nbytes, is_candidate, reason)


def _is_a_servers(directory: Directory) -> bool:
    """True if the directory holds nothing but what a server puts there. Raises OSError."""
    for entry in directory.entries():
        if not _SERVER_FILE.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
            return False
    with contextlib.suppress(FileNotFoundError):
        if directory.stat(LOCK_NAME).st_size:
            return False
    try:
        fd = directory.open(journal.FILE_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return True
    with open(fd, "rb") as file:
        return journal.is_start_of_journal(file)


def delete_directory(path: Path, min_age_s: float = MIN_AGE_S) -> bool:
    """Deletes a candidate; False if the directory is none, or none any more.

    Raises BlockingIOError if a running server holds the lock, and OSError.
    """
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(contextlib.closing(Directory.open_root(path.parent, None)))
        try:
            directory = stack.enter_context(contextlib.closing(root.open_directory(path.name)))
            if not _is_a_servers(directory):
                return False
        except UntrustedFileError:
            return False
        aside = path.name
        if not aside.startswith(DELETED_PREFIX):
            stack.enter_context(contextlib.closing(DirectoryLock(directory, is_owner=False)))
            if heartbeat_age_s(directory) < min_age_s:
                return False  # Its server has come back, and stopped, since the survey.
            aside = f"{DELETED_PREFIX}{path.name}-{secrets.token_hex(8)}"
            root.rename(path.name, aside)
        with contextlib.suppress(FileNotFoundError):  # Another command deletes it at the same time.
            for name in sorted(entry.name for entry in directory.entries()):  # The journal and the lock last.
                if _SERVER_FILE.fullmatch(name):
                    with contextlib.suppress(FileNotFoundError):
                        directory.unlink(name)
            root.rmdir(aside)
    return True
