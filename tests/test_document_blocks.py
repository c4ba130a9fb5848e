"""Every command and every Python block of the documents runs, or says why it does not."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from docsite.command_line import kvpool_command, server_command
from tests.support.document_blocks import ROOT, Block, Session, blocks, prints

PAGES = sorted(
    [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *(ROOT / "docs").rglob("*.md")]
)
KVPOOL, SERVER = kvpool_command(), server_command()
QUICK = {"README.md", "docs/tutorials/quickstart.md", "docs/reference/python.md", "docs/how-to/write-a-client.md"}
"""Pages whose blocks `make test` runs: those that a newcomer reads first. `make test-all` runs all."""
WITH_CODE = [page for page in PAGES if any(block.is_code for block in blocks(page))]
NAMES = [str(page.relative_to(ROOT)) for page in WITH_CODE]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.more] * (name not in QUICK))
        for page, name in zip(WITH_CODE, NAMES, strict=True)
    ],
    ids=NAMES,
)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, record_property: Any) -> None:
    """In their order, against real servers that the page itself starts."""
    ran, printed = Counter[str](), ""
    session = Session(tmp_path)
    try:
        for block in blocks(page):
            if block.how == "run: prints":
                assert prints(printed, block) == [], f"{page.name}:{block.line}: not among what was printed:\n{printed}"
            elif block.is_code and block.is_run:
                try:
                    printed = session.run(block)
                except AssertionError as wrong:
                    raise AssertionError(f"{page.name}:{block.line}: {wrong}") from None
                ran["run"] += block.how != "run first"
            elif block.is_code:
                ran["run by another test" if block.how.startswith("run by:") else "not run"] += 1
    finally:
        session.close()
    for what, count in ran.items():
        record_property(f"blocks {what}", count)


def test_blocks_that_are_not_run_say_why() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert re.fullmatch(r"|not run: .{8,}|run: (fails|continues|prints)|run by: .+|run first", block.how), block
            if block.how.startswith("run by:"):
                file, _, test = block.how.removeprefix("run by:").strip().partition("::")
                assert f"def {test}(" in (ROOT / file).read_text(), block.how


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_files_can_be_read(page: Path) -> None:
    readers = {"json": json.loads, "toml": tomllib.loads, "yaml": lambda text: list(yaml.safe_load_all(text))}
    for block in blocks(page):
        if block.language in readers:
            readers[block.language](block.text)


def _commands(text: str) -> list[str]:
    """The calls of kvpool and kvpool-server in a text, each with its arguments."""
    text = re.sub(r"\\\n\s*", " ", text)
    return re.findall(r"(?:^|[\s$`(])(kvpool(?:-server)? [^\n`#|&;>)]*)", text)


def _options(command: Any) -> set[str]:
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


def _unknown(line: str) -> list[str]:
    """Options and commands of a line that the program does not have."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    given = [word.partition("=")[0].rstrip(".,:") for word in words if re.match(r"--?[a-z]", word)]
    if words[0] == "kvpool-server":
        known = _options(SERVER)
    else:
        command = KVPOOL
        known = _options(command)
        for word in words[1:]:
            if not re.fullmatch(r"[a-z-]+", word) or word.startswith("-"):
                continue
            if word in getattr(command, "commands", {}):
                command = command.commands[word]
                known |= _options(command)
    return [option for option in given if option not in {*known, "--help", "--version"}]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_of_a_command_exists(page: Path) -> None:
    """Also in sentences, and in blocks that are not run."""
    unknown = {line: wrong for line in _commands(page.read_text()) if (wrong := _unknown(line))}
    assert not unknown


@pytest.fixture
def session(tmp_path: Path) -> Any:
    made = Session(tmp_path)
    yield made
    made.close()


def test_a_block_that_fails_is_found(session: Session) -> None:
    session.run(Block("bash", "name=there; false || true\n", "", 1))
    assert session.run(Block("bash", "echo $name", "", 1)) == "there\n"
    session.run(Block("bash", "false\ntrue\n", "run: fails", 1))
    with pytest.raises(AssertionError, match="status 0"):
        session.run(Block("bash", "true\n", "run: fails", 1))
    with pytest.raises(AssertionError, match="no-such-command"):
        session.run(Block("bash", "no-such-command\ntrue\n", "", 1))
