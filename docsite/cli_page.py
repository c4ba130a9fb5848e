"""The site's page of the command line: every option of every command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docsite.command_line import kvpool_command, server_command

INTRODUCTION = """# Command line

Every option, as `--help` lists them. [Commands](commands.md) shows what the commands of `kvpool` print, their JSON and
exit statuses; [configuration](configuration.md) says more about the settings of the server.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *_command("kvpool-server", server_command(), 2), *_command("kvpool", kvpool_command(), 2)]
    return "\n".join(parts).rstrip() + "\n"


def _command(name: str, command: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} {name}\n"
    if command.help:
        yield f"{_prose(command.help)}\n"
    words = [_word(parameter) for parameter in command.params if _is_argument(parameter)]
    inner = getattr(command, "commands", {})
    options = [parameter for parameter in command.params if not _is_argument(parameter) and not parameter.hidden]
    usage = [name, *["[OPTIONS]"] * bool(options), *words, *["COMMAND"] * bool(inner)]
    yield f"```text\n{' '.join(usage)}\n```\n"
    rows = [_row(parameter) for parameter in command.params if _is_argument(parameter) and parameter.help]
    rows += [_row(parameter) for parameter in options]
    if rows:
        yield "| option | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    for each in sorted(inner):
        yield from _command(f"{name} {each}", inner[each], level + 1)


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if _is_argument(parameter):
        names = f"`{_word(parameter)}`"
    elif not parameter.is_flag and parameter.metavar:
        names += f" `{parameter.metavar}`"
    variables = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
    told = "".join(f"; or `{variable}`" for variable in variables)
    default = "" if parameter.default in (None, "", False, (), []) or callable(parameter.default) else parameter.default
    meaning, _, of_help = (parameter.help or "").removesuffix(")").partition(" (default: ")
    default = {"none": "", "False": ""}.get(of_help, of_help) or default
    shown = "must be given" if parameter.required else f"`{default}`" if default != "" else ""
    return f"| {names} | {shown} | {_prose(meaning).rstrip('.')}{told} |"


def _word(argument: Any) -> str:
    """An argument as the usage line shows it."""
    name = str(argument.metavar or argument.name.upper())
    return f"{name}..." if argument.nargs != 1 else name


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _prose(text: str) -> str:
    """Without marks of rich and of tables, and with what looks like a tag of HTML escaped."""
    text = " ".join(text.replace("\\[", "[").split())
    return re.sub(r"(?<!`)<([a-z]+)>", r"\\<\1>", text).replace("|", "\\|").replace("](", "]\\(")
