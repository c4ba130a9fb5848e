"""What may be released, and what the refusals say."""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path

import pytest

from release.changelog import ReleaseError, parse
from release.check import check, check_source
from tests.support.processes import run_command

ROOT = Path(__file__).parents[2]
TODAY = date(2026, 11, 23)
GOOD = """# Changelog

## [Unreleased]

## [1.1.0] - 2026-11-23

### Added

- A lookup.

### Fixed

- A leak.

## [1.0.0] - 2026-10-01

### Added

- Everything.
"""


def test_the_changelog_of_this_repository_has_the_form() -> None:
    assert parse((ROOT / "CHANGELOG.md").read_text())


def test_a_release_whose_tag_version_and_changelog_agree_may_be_made() -> None:
    release = check("v1.1.0", GOOD, "1.1.0", TODAY)
    assert release.day == TODAY
    assert release.text.startswith("### Added\n\n- A lookup.") and release.text.endswith("- A leak.")


@pytest.mark.parametrize(
    ("tag", "version", "old", "new", "says"),
    [
        ("v1.2.0", "1.1.0", "", "", "tag v1.2.0 is not v1.1.0"),
        ("1.1.0", "1.1.0", "", "", "tag 1.1.0 is not v1.1.0"),
        ("v1.2.0", "1.2.0", "", "", "the newest version of the changelog is 1.1.0"),
        ("v1.1.0", "1.1.0", "[Unreleased]\n", "[Unreleased]\n\n### Fixed\n\n- More.\n", "unreleased entries"),
        ("v1.1.0", "1.1.0", "## [Unreleased]\n", "", r"has to be '## \[Unreleased\]'"),
        ("v1.1.0", "1.1.0", " - 2026-11-23", "", "version 1.1.0 of the changelog has no date"),
        ("v1.1.0", "1.1.0", "2026-11-23", "2026-11-31", "version 1.1.0 of the changelog has no date"),
        ("v1.1.0", "1.1.0", "2026-11-23", "2026-11-25", "which is after 2026-11-23"),
        ("v1.1.0", "1.1.0", "## [1.1.0] - 2026-11-23", "## 1.1.0 (today)", "is not of the form"),
        ("v1.1.0", "1.1.0", "[1.1.0]", "[next]", "'next' in the changelog is no version"),
        ("v1.1.0", "1.1.0", "[1.0.0]", "[1.2.0]", "newest first: 1.1.0, 1.2.0"),
        ("v1.1.0", "1.1.0", "### Fixed", "### News", "section 'News' of 1.1.0"),
        ("v1.1.0", "1.1.0", "- A leak.", "Nothing.", "section 'Fixed' of 1.1.0 in the changelog is empty"),
    ],
)
def test_what_does_not_agree_is_named(tag: str, version: str, old: str, new: str, says: str) -> None:
    changelog = GOOD.replace(old, new, 1) if old else GOOD
    with pytest.raises(ReleaseError, match=says):
        check(tag, changelog, version, TODAY)


def test_a_release_of_which_the_changelog_says_nothing_is_refused() -> None:
    changelog = "## [Unreleased]\n\n## [1.1.0] - 2026-11-23\n"
    with pytest.raises(ReleaseError, match=r"says nothing about 1\.1\.0"):
        check("v1.1.0", changelog, "1.1.0", TODAY)


def test_links_to_another_repository_are_refused() -> None:
    ci = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "someone/kvpool"}
    check_source("https://github.com/someone/kvpool", ci)
    check_source("https://github.com/someone/kvpool", {})
    with pytest.raises(ReleaseError, match="correct the URLs"):
        check_source("https://github.com/else/kvpool", ci)


def test_the_command_refuses_a_tag_of_another_version() -> None:
    ran = run_command(sys.executable, "-m", "release.check", "v99.0.0")
    assert ran.returncode == 1
    assert ran.stderr.startswith("release: tag v99.0.0 is not v")
