"""A newcomer has a pool with TLS and two engines after ten minutes of reading and typing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
WORDS_A_MINUTE = 200
"""Of somebody who reads technical prose to follow it."""
LETTERS_A_MINUTE = 200
"""Of somebody who types commands, without copying them."""


@pytest.mark.parametrize(("page", "minutes"), [("quickstart.md", 5), ("two-hosts.md", 10), ("several-hosts.md", 10)])
def test_a_tutorial_takes_as_long_as_it_says(page: str, minutes: int) -> None:
    text = re.sub(r"<!--.*?-->", "", (TUTORIALS / page).read_text(), flags=re.DOTALL).split("\n## 5. With your vLLM\n")[
        0
    ]
    typed = sum(len(block) for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    words = len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split())
    assert words > 200 and typed > 200
    assert words / WORDS_A_MINUTE + typed / LETTERS_A_MINUTE <= minutes
