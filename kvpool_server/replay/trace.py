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

from kvpool.types import HASH_BYTES

LATEST_MS = 1e15
MAX_ID = 1 << 8 * HASH_BYTES
MAX_BLOCKS = 65_536


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
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text ({error})") from None
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            request = Request(_seconds(fields["timestamp"]), _ids(fields["hash_ids"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: no request of a trace ({error!r})") from None
        requests.append(request)
    return requests


def _seconds(timestamp_ms: float) -> float:
    if not 0 <= timestamp_ms <= LATEST_MS:
        raise ValueError(f"timestamp {timestamp_ms} is not between 0 and {LATEST_MS:g} ms")
    return timestamp_ms / 1000


def _ids(ids: list[int]) -> list[int]:
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < MAX_ID for each in ids):
        raise ValueError("hash_ids is no list of whole numbers from 0 on")
    if len(ids) > MAX_BLOCKS:
        raise ValueError(f"{len(ids)} blocks in one prompt; a trace has at most {MAX_BLOCKS}")
    return ids


def num_blocks(requests: Sequence[Request]) -> int:
    """How many blocks all prompts have."""
    return sum(len(request.ids) for request in requests)


def num_distinct(requests: Sequence[Request]) -> int:
    """How many blocks there are, each counted once."""
    return len({block for request in requests for block in request.ids})
