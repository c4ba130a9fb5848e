"""The commands `kvpool` and `kvpool-server` with all of their options, for pages and the tests of pages."""

from __future__ import annotations

from typing import Any

import typer

from kvpool.cli import app
from kvpool_server.app.command import serve
from kvpool_server.tiers.command import app as tier


def kvpool_command() -> Any:
    """`kvpool`, a group of click's, with the commands that `kvpool.cli.main` adds where they are asked for."""
    common = app.registered_callback.callback if app.registered_callback else None
    whole = typer.Typer(callback=common, help=app.info.help)
    whole.registered_commands = [*app.registered_commands]
    whole.registered_groups = [*app.registered_groups]
    whole.add_typer(tier, name="tier")
    return typer.main.get_command(whole)


def server_command() -> Any:
    """`kvpool-server`, a command of click's."""
    server = typer.Typer(add_completion=False)
    server.command()(serve)
    return typer.main.get_command(server)
