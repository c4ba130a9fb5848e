"""The commands `kvpool` and `kvpool-server` with all of their options, for pages and the tests of pages."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import typer

from kvpool.cli import app
from kvpool_server.app.command import serve


def kvpool_command() -> Any:
    """`kvpool`, a group of click's, with the commands that other packages register."""
    common = app.registered_callback.callback if app.registered_callback else None
    whole = typer.Typer(callback=common, help=app.info.help)
    whole.registered_commands = [*app.registered_commands]
    whole.registered_groups = [*app.registered_groups]
    for point in importlib.metadata.entry_points(group="kvpool.commands"):
        loaded = point.load()
        if isinstance(loaded, typer.Typer):
            whole.add_typer(loaded, name=point.name)
        else:
            whole.command(point.name)(loaded)
    return typer.main.get_command(whole)


def server_command() -> Any:
    """`kvpool-server`, a command of click's."""
    server = typer.Typer(add_completion=False)
    server.command()(serve)
    return typer.main.get_command(server)
