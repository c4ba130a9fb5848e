"""What an audit log says so far. Its lines are written by a thread, some time after the calls that they are about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def entries(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; the last one may be half written."""
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
