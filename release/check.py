"""May this commit be released under this tag? `python -m release.check v1.2.3 --notes notes.md`

Checks that the tag, the package's version and the newest version of the changelog are the same, that nothing is left
unreleased, and that the package's links lead to the repository that builds it. Writes the release's notes.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Annotated

import typer

from kvpool.version import __version__
from release.changelog import Release, ReleaseError, parse

ROOT = Path(__file__).parents[1]


def check(tag: str, changelog: str, version: str, today: date) -> Release:
    """The release that a tag names.

    Args:
        tag: `v` and the version.
        changelog: text of CHANGELOG.md.
        version: of the package.
        today: nothing is released with a later date, but for a day's difference of time zones.

    Raises:
        ReleaseError: they do not agree.
    """
    if tag != f"v{version}":
        raise ReleaseError(f"tag {tag} is not v{version}: set __version__ in kvpool/version.py, or move the tag")
    unreleased, *released = parse(changelog)
    if not released or released[0].name != version:
        newest = released[0].name if released else "none"
        raise ReleaseError(f"the newest version of the changelog is {newest}: add '## [{version}] - {today}'")
    release = released[0]
    if not unreleased.is_empty:
        raise ReleaseError(f"the changelog has unreleased entries: move them to {version}")
    if release.is_empty:
        raise ReleaseError(f"the changelog says nothing about {version}: add what has changed for users")
    if release.day is None or release.day > today + timedelta(days=1):
        raise ReleaseError(f"the changelog has {version} released on {release.day}, which is after {today}")
    return release


def check_source(source: str, environment: Mapping[str, str]) -> None:
    """Checks that the package's metadata name the repository that builds the package, where CI tells it.

    Raises:
        ReleaseError: another repository is named.
    """
    built_by = f"{environment.get('GITHUB_SERVER_URL', '')}/{environment.get('GITHUB_REPOSITORY', '')}"
    if built_by != "/" and source != built_by:
        raise ReleaseError(f"[project.urls] of pyproject.toml name {source}, and this is {built_by}: correct the URLs")


def main(
    tag: Annotated[str, typer.Argument(help="The release's tag, such as v1.2.3.")],
    notes: Annotated[Path | None, typer.Option(help="File to write the release's notes to.")] = None,
) -> None:
    """Checks a release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    try:
        release = check(tag, (ROOT / "CHANGELOG.md").read_text(), __version__, date.today())
        check_source(project["urls"]["Source"], os.environ)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if notes:
        notes.write_text(release.text + "\n")
    print(f"release: {tag} of {release.day} may be made")


if __name__ == "__main__":
    typer.run(main)
