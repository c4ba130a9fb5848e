"""`kvpool tier gc`: deletes directories below a file tier's path whose servers have gone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpool.holdings import duration_text, printable
from kvpool.option_bounds import within
from kvpool.quotas import size_text
from kvpool_server.tiers.file import orphans

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
    ] = orphans.MIN_AGE_S,
) -> None:
    """List, or delete, the directories of servers that have gone. Blocks in them can be read until then.

    A directory is a candidate if no server holds its lock, its server's last heartbeat is old, and nothing but a
    server's files lies in it.
    """
    try:
        surveys = orphans.survey(path, min_age_s)
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
    failed = [each.directory for each in candidates if not _is_deleted(each.directory, min_age_s)]
    typer.echo(f"deleted {len(candidates) - len(failed)} of {len(candidates)} candidates")
    if failed:
        raise typer.Exit(1)


def _is_deleted(directory: Path, min_age_s: float) -> bool:
    name = printable(str(directory))
    try:
        if orphans.delete(directory, min_age_s):
            return True
        typer.echo(f"kvpool tier gc: {name} is in use again, and was not deleted", err=True)
    except BlockingIOError:
        typer.echo(f"kvpool tier gc: a server has locked {name} meanwhile; it was not deleted", err=True)
    except OSError as error:
        typer.echo(f"kvpool tier gc: {name} cannot be deleted: {error.strerror}", err=True)
    return False
