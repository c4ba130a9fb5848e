"""A trace: which blocks the prompts of a service had, and when they came.

A file of one JSON object a line, with `timestamp` (ms) and `hash_ids` (an id a block; equal ids are equal prefixes), as
the Mooncake paper published them.

Source of the format: Qin et al., Mooncake, FAST '25.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of a trace.

    Args:
        at_s: when it came.
        ids: of its blocks, from the start of the prefix on.
    """

    at_s: float
    ids: Sequence[int]


def load(path: Path) -> list[Request]:
    """Reads a trace. Raises ValueError for a line that is none."""
    requests = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            fields = json.loads(line)
            request = Request(fields["timestamp"] / 1000, fields["hash_ids"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: no request of a trace ({error!r})") from None
        requests.append(request)
    return requests


def num_blocks(requests: Sequence[Request]) -> int:
    """How many blocks all prompts have."""
    return sum(len(request.ids) for request in requests)


def num_distinct(requests: Sequence[Request]) -> int:
    """How many blocks there are, each counted once."""
    return len({block for request in requests for block in request.ids})
