"""CHANGELOG.md in the form of Keep a Changelog (https://keepachangelog.com/en/1.1.0/): its versions, newest first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from packaging.version import InvalidVersion, Version

SECTIONS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
UNRELEASED = "Unreleased"


class ReleaseError(Exception):
    """The release cannot be made; the message names what is wrong and the fix."""


@dataclass(frozen=True, slots=True)
class Release:
    """One version of the changelog.

    Args:
        name: the version, or `UNRELEASED`.
        day: of its release; None for `UNRELEASED`.
        text: Markdown below the heading.
    """

    name: str
    day: date | None
    text: str

    @property
    def is_empty(self) -> bool:
        """True if the version has no entry."""
        return not re.search(r"^- ", self.text, re.MULTILINE)


def parse(text: str) -> Sequence[Release]:
    """The versions of a changelog, newest first.

    Raises:
        ReleaseError: the text does not have the form.
    """
    _, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    if not parts:
        raise ReleaseError(f"the changelog has no version; begin one with '## [{UNRELEASED}]'")
    releases = [_release(*part.partition("\n")[::2]) for part in parts]
    if releases[0].name != UNRELEASED or UNRELEASED in {release.name for release in releases[1:]}:
        raise ReleaseError(f"the changelog's first version, and no other, has to be '## [{UNRELEASED}]'")
    versions = [Version(release.name) for release in releases[1:]]
    if versions != sorted(set(versions), reverse=True):
        raise ReleaseError(f"the changelog's versions are not in order, newest first: {', '.join(map(str, versions))}")
    return releases


def _release(heading: str, body: str) -> Release:
    found = re.fullmatch(r"\[([^]]+)\](?: - (\d{4}-\d\d-\d\d))?", heading.strip())
    if not found:
        raise ReleaseError(f"heading '## {heading}' of the changelog is not of the form '## [1.2.3] - 2026-01-31'")
    name, day = found.groups()
    for section in re.findall(r"^### (.+)$", body, re.MULTILINE):
        if section not in SECTIONS:
            raise ReleaseError(f"section '{section}' of {name} in the changelog: choose one of {', '.join(SECTIONS)}")
    for section in re.split(r"^### ", body, flags=re.MULTILINE)[1:]:
        if not re.search(r"^- ", section, re.MULTILINE):
            raise ReleaseError(f"section '{section.split()[0]}' of {name} in the changelog is empty: remove it")
    if name == UNRELEASED:
        if day:
            raise ReleaseError(f"heading '## {heading}' of the changelog has a date: remove it")
        return Release(name, None, body.strip())
    try:
        Version(name)
        return Release(name, date.fromisoformat(day or ""), body.strip())
    except InvalidVersion:
        raise ReleaseError(f"'{name}' in the changelog is no version; write one as 1.2.3") from None
    except ValueError:
        raise ReleaseError(f"version {name} of the changelog has no date; write '## [{name}] - YYYY-MM-DD'") from None
