"""`kvpool name-key`: keys by which engines name blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpool.security.name_key import NameKey

app = typer.Typer(no_args_is_help=True, help="Make and compare keys by which the engines of a tenant name blocks.")

File = Annotated[Path, typer.Argument(metavar="FILE", help="File of the key (name_key_file of engines and clients).")]


@app.command()
def create(file: File) -> None:
    """Make a key in a new file that only its owner can read. Give all engines that share blocks a copy."""
    typer.echo(f"made {file}, key {NameKey.create(file).digest}; keep it away from servers")


@app.command()
def show(file: File) -> None:
    """Print the digest of a key, by which `kvpool namespaces` and the engines' logs name it."""
    typer.echo(NameKey.read(file).digest)
