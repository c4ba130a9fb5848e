from __future__ import annotations

from pathlib import Path

import pytest
import vllm

from vllm_plugin.connector import TESTED, warn_if_untested


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1rc2", "0.32.0+cpu", vllm.__version__])
def test_tested_releases_are_silent(version: str) -> None:
    assert not warn_if_untested(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "0.34.0.dev1+gabc", "dev"])
def test_others_are_warned_of(version: str, caplog: pytest.LogCaptureFixture) -> None:
    assert warn_if_untested(version)


def test_the_compatibility_page_says_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/compatibility.md").read_text()
    assert all(f"{major}.{minor}" in page for major, minor in TESTED)
