"""The generated pages are what the code gives now."""

from __future__ import annotations

import re

import kvpool
from docsite import cli_page, rpc_page, settings_tables
from docsite.command_line import kvpool_command
from docsite.rpc_page import SOURCE
from kvpool.v1 import pool_pb2


def test_the_tables_of_settings_are_current() -> None:
    text = settings_tables.PAGE.read_text()
    assert settings_tables.page(text) == text, "python -m docsite.settings_tables"


def test_each_command_is_on_the_page_of_the_command_line() -> None:
    page = cli_page.page()
    for name, command in kvpool_command().commands.items():
        for path in (name, *(f"{name} {inner}" for inner in getattr(command, "commands", {}))):
            assert re.search(rf"^#+ kvpool {path}$", page, re.MULTILINE), path


def test_each_call_and_message_is_told_of() -> None:
    page = rpc_page.page()
    for method in pool_pb2.DESCRIPTOR.services_by_name["Pool"].methods:
        assert re.search(rf"^### {method.name}\n\n\S", page, re.MULTILINE), f"{method.name} has no comment in {SOURCE}"
    for name in pool_pb2.DESCRIPTOR.message_types_by_name:
        assert f"\n### {name}\n" in page
    # A comment above a field, one behind it, and one of a nested message's field.
    assert "| 2 | `nbytes` | `uint64` | of the arena" in page


def test_a_setting_that_the_page_lacks_gets_the_code_s_text() -> None:
    page = settings_tables.PAGE.read_text()
    without = re.sub(r"^\| `drain_ms` .*\n", "", page, flags=re.MULTILINE)
    wrong = page.replace("| `grace_ms` | `30000` |", "| `grace_ms` | `1` |")
    assert without != page != wrong
    assert re.search(r"^\| `drain_ms` \| `5000` \| \w+", settings_tables.page(without), re.MULTILINE)
    assert settings_tables.page(wrong) == page


def test_each_public_name_is_in_the_reference_of_python() -> None:
    page = settings_tables.PAGE.with_name("python.md").read_text()
    errors = {name for name in kvpool.__all__ if name.endswith("Error")}
    told = set(re.findall(r"^::: kvpool\.\w+\.\w+\.(\w+)$", page, re.MULTILINE))
    assert {*kvpool.__all__} - errors - {"__version__"} <= told
    assert "::: kvpool.protocol.errors\n" in page
