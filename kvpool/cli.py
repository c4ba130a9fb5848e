"""The `kvpool` command: registers the commands that inspect and operate a running server."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.main import get_command

from kvpool.commands.common import TRUST, ExitStatus, Trust
from kvpool.commands.credentials import certs, name_key, token
from kvpool.commands.doctor import doctor
from kvpool.commands.explain import explain
from kvpool.commands.namespaces import clear, namespaces, quota
from kvpool.commands.prompts import expire, pin, prefetch
from kvpool.commands.savings import ledger, value
from kvpool.commands.server import drain, events, ping, whoami
from kvpool.commands.stats import stats
from kvpool.commands.top import top
from kvpool.protocol.errors import ConfigError, InvalidRequestError, KVPoolError
from kvpool.security.certificates import CA_NAME, CERTIFICATE_NAME, KEY_NAME
from kvpool.version import __version__

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, help="Inspect and operate a running kvpool-server."
)


@app.callback(invoke_without_command=True)
def _common(
    context: typer.Context,
    tls: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            envvar="KVPOOL_TLS",
            help=f"Directory with {CA_NAME}, {CERTIFICATE_NAME} and {KEY_NAME}, as `kvpool certs` makes them; for "
            f"--token-file {CA_NAME} is enough.",
        ),
    ] = None,
    token_file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            envvar="KVPOOL_TOKEN_FILE",
            help="File with a bearer token, as `kvpool token create` makes it; with --tls.",
        ),
    ] = "",
    insecure_network: Annotated[
        bool,
        typer.Option(
            "--insecure-network",
            envvar="KVPOOL_INSECURE_NETWORK",
            help="Without --tls: talk to other hosts in plaintext, on a network where all are trusted.",
        ),
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"kvpool {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.fail("Missing command.")
    TRUST.set(Trust(tls, token_file, insecure_network))


_INSPECTING = (ping, whoami, stats, top, doctor, namespaces, quota, drain, events, explain, value, ledger)
for _command in (*_INSPECTING, pin, expire, prefetch):
    app.command()(_command)
app.command(context_settings={"allow_extra_args": True})(clear)  # To name the option that is missing.
app.add_typer(certs, name="certs")
app.add_typer(name_key, name="name-key")
app.add_typer(token, name="token")


def main() -> None:
    """Entry point of the console script. Prints errors as one sentence."""
    arguments = _common_options_first(sys.argv[1:])
    if arguments in ([], ["--help"]) or "tier" in arguments:  # By name: it imports the server, which few users need.
        app.add_typer(importlib.import_module("kvpool_server.tiers.command").app, name="tier")
    try:
        app(arguments)
    except KVPoolError as error:
        typer.echo(f"kvpool: {error}", err=True)
        is_usage = isinstance(error, ConfigError | InvalidRequestError)
        raise SystemExit(ExitStatus.USAGE if is_usage else ExitStatus.PROBLEM) from None


def _common_options_first(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the options of all commands before the command, where typer looks for them."""
    is_flag = {name: getattr(each, "is_flag", False) for each in get_command(app).params for name in each.opts}
    first: list[str] = []
    rest: list[str] = []
    left = iter(arguments)
    for each in left:
        name, equals, _ = each.partition("=")
        (first if name in is_flag else rest).append(each)
        if equals or is_flag.get(name, True):
            continue
        if (value := next(left, None)) is None:
            return first  # Typer says that the last option has no value.
        first.append(value)
    return first + rest


if __name__ == "__main__":
    main()
