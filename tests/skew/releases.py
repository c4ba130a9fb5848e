"""Trees of other releases of kvpool, each in a folder of its own, from which servers and clients are started."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from kvpool.version import PROTOCOL

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("previous-release")


@dataclass(frozen=True, slots=True)
class Tree:
    """A release's files.

    Args:
        name: for people: current, previous, next, unknown.
        protocol: that it speaks.
    """

    name: str
    path: Path
    protocol: int

    def works_with(self, other: Tree) -> bool:
        """What the documents promise: releases work together whose protocols differ by one at most."""
        return abs(self.protocol - other.protocol) <= 1


CURRENT = Tree("current", ROOT, PROTOCOL)


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, timeout=60, check=False)


def previous_ref() -> str:
    """The tag or commit of the previous release. AssertionError, with what to do, if this clone lacks it."""
    (ref,) = (line.strip() for line in RECORD.read_text().splitlines() if line.strip() and not line.startswith("#"))
    assert _git("cat-file", "-e", f"{ref}^{{commit}}").returncode == 0, (
        f"this clone lacks the previous release {ref}, which {RECORD.name} names; run `git fetch --unshallow --tags`, "
        "in CI give actions/checkout `fetch-depth: 0`"
    )
    return ref


def unpack(paths: list[str], into: Path) -> Path:
    """Writes files of the previous release to a folder. They run from there: kvpool has no compiled parts."""
    packed = _git("archive", "--format=tar", previous_ref(), *paths)
    assert packed.returncode == 0, packed.stderr.decode(errors="replace")
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        tar.extractall(into, filter="data")
    return into


def previous(into: Path) -> Tree:
    """The previous release, built from git."""
    path = unpack(["kvpool", "kvpool_server"], into)
    found = re.search(r"^PROTOCOL = (\d+)$", (path / "kvpool/version.py").read_text(), re.MULTILINE)
    return Tree("previous", path, int(found[1]) if found is not None else 0)


def later(name: str, into: Path, protocol: int) -> Tree:
    """This release as if it were a later one: a copy with another version and protocol."""
    for package in ("kvpool", "kvpool_server"):
        shutil.copytree(ROOT / package, into / package, ignore=shutil.ignore_patterns("__pycache__"))
    version = into / "kvpool/version.py"
    text = re.sub(r"^PROTOCOL = \d+$", f"PROTOCOL = {protocol}", version.read_text(), flags=re.MULTILINE)
    text = re.sub(r'^__version__ = ".*"$', f'__version__ = "{protocol}.0.0"', text, flags=re.MULTILINE)
    assert f"PROTOCOL = {protocol}\n" in text and f'"{protocol}.0.0"' in text, "version.py has another form"
    version.write_text(text)
    return Tree(name, into, protocol)
