"""The tables of docs/reference/configuration.md: names and defaults come from the code.

The meaning of a setting that the page has stays as it is, with its links; a setting that the page lacks gets the text
of the code. `python -m docsite.settings_tables` writes the page.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvpool.client.config import ClientConfig
from kvpool_server.settings.config import ServerConfig, describe
from vllm_plugin.config import ConnectorConfig

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "configuration.md"
SECTIONS = ("kvpool-server", "The connector: `kv_connector_extra_config`", "The client: `ClientConfig`")

Row = tuple[str, str, str]
"""Name, default as the page writes it, and the code's text."""


def page(text: str) -> str:
    """The page with its tables of settings brought up to date."""
    settings = (_server(), _of_fields(ConnectorConfig), _of_fields(ClientConfig))
    for heading, rows in zip(SECTIONS, settings, strict=True):
        text = _with_table(text, heading, list(rows))
    return text


def _server() -> Iterable[Row]:
    for name in ServerConfig.model_fields:
        meaning, default = describe(name)
        yield name, default, meaning


def _of_fields(config: Any) -> Iterable[Row]:
    texts = dict(re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", config.__doc__ or "", re.MULTILINE))
    for field in dataclasses.fields(config):
        default = str(field.default)
        if config is ConnectorConfig:
            default = {True: "true", "": '""'}.get(field.default, default)
        yield field.name, default, " ".join(texts.get(field.name, "").split())


def _with_table(text: str, heading: str, rows: list[Row]) -> str:
    before, mark, rest = text.partition(f"\n## {heading}\n")
    assert mark, f"configuration.md has no section {heading!r}"
    table = re.search(r"^\|.*\n\|---.*\n(?:\|.*\n)+", rest, re.MULTILINE)
    assert table, f"section {heading!r} has no table"
    head, rule, *body = table[0].splitlines()
    told = {found[1]: found[2] for line in body if (found := re.match(r"\| `([^`]+)` \|[^|]*\| (.*) \|$", line))}
    order = list(told) + [name for name, *_ in rows]
    written = {
        name: f"| `{name}` | {f'`{default}`' if default else ''} | {told.get(name) or meaning} |"
        for name, default, meaning in rows
    }
    lines = [head, rule, *(written[name] for name in dict.fromkeys(order) if name in written)]
    return f"{before}{mark}{rest[: table.start()]}" + "\n".join(lines) + "\n" + rest[table.end() :]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
