"""How many cases tests try: few in `make test`; all, and several times as many random ones, in `make test-all`.

The variable has no prefix KVPOOL_: servers that tests and benchmarks start would refuse it as an unknown key.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

EFFORT = float(os.environ.get("TEST_EFFORT", "1"))


def effort(count: int) -> int:
    """How many examples or schedules to try where `make test` tries `count`."""
    return max(1, round(count * EFFORT))


def some(count: int, values: Iterable[Any]) -> list[Any]:
    """Values to parametrize with: `make test` takes the first `count`, `make test-all` all of them."""
    return [value if nth < count else pytest.param(value, marks=pytest.mark.more) for nth, value in enumerate(values)]
