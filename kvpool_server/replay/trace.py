"""Traces: the blocks of a service's prompts, and when each prompt came.

A trace is a recording of `kvpool-server --record` (see `recording`), or a file of JSON lines, each with `timestamp`
(ms) and `hash_ids` (one id for each block; equal ids mean equal prefixes), the format of the traces published with the
Mooncake paper.

Source of the format: Qin et al., Mooncake, FAST '25.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpool.types import HASH_BYTES

LATEST_MS = 1e15
MAX_ID = 1 << 8 * HASH_BYTES
MAX_BLOCKS = 65_536
MAX_LINE_BYTES = 8 << 20
MAX_IDS = 1 << 25
"""Of all requests: more than a recording of the default size holds."""
MAX_REQUESTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of a trace; of a recording, one run of a lookup or put.

    Args:
        at_s: when it came, in seconds.
        ids: of its blocks, from the first.
        hits: leading blocks that the recorded pool had; None: not recorded, and the prompt stores all of its blocks.
        parent: id of the block before the first one; None: there is none.
        is_put: a put: its blocks are stored, and not looked up.
    """

    at_s: float
    ids: Sequence[int]
    hits: int | None = None
    parent: int | None = None
    is_put: bool = False

    @property
    def stored(self) -> Sequence[int]:
        """The blocks that are in a pool of any size afterwards, if they fit.

        Of a recorded lookup only those that hit: the engine that computes them instead stores them. Others may never
        have been stored; if they were, a recorded put follows.
        """
        return self.ids if self.hits is None else self.ids[: self.hits]


class Bounds:
    """Of a trace that is being read: a small file may not take all of a machine's memory."""

    def __init__(self) -> None:
        self._num_requests = self._num_ids = 0

    def add(self, request: Request) -> None:
        """Counts a request. Raises ValueError if there are too many."""
        self._num_requests += 1
        self._num_ids += len(request.ids)
        if self._num_requests > MAX_REQUESTS:
            raise ValueError(f"there are more than {MAX_REQUESTS:,} requests; give the trace's first lines")
        if self._num_ids > MAX_IDS:
            raise ValueError(f"there are more than {MAX_IDS:,} ids; give the trace's first lines")


def load(path: Path) -> list[Request]:
    """Reads a trace. Raises ValueError if the file is not text, or a line is not a request."""
    from kvpool_server.replay.recording import is_recording, load_recording

    if is_recording(path):
        return load_recording(path)
    requests, bounds = [], Bounds()
    for number, line in enumerate(_lines(path), 1):
        try:
            fields = json.loads(line)
            request = Request(_seconds(fields["timestamp"]), _ids(fields["hash_ids"]))
            bounds.add(request)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} has no valid timestamp and hash_ids ({error!r})") from None
        requests.append(request)
    return requests


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{path} has a line of more than {MAX_LINE_BYTES >> 20} MiB; give JSON lines")
            try:
                yield line.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not a text file ({error}); give JSON lines") from None


def _seconds(timestamp_ms: float) -> float:
    if not 0 <= timestamp_ms <= LATEST_MS:
        raise ValueError(f"timestamp {timestamp_ms} is not between 0 and {LATEST_MS:g} ms")
    return timestamp_ms / 1000


def _ids(ids: list[int]) -> list[int]:
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < MAX_ID for each in ids):
        raise ValueError("hash_ids is not a list of integers from 0 on")
    if len(ids) > MAX_BLOCKS:
        raise ValueError(f"the prompt has {len(ids)} blocks; at most {MAX_BLOCKS} are read")
    return ids


def num_blocks(requests: Sequence[Request]) -> int:
    """Blocks of all prompts together; of a recording, those that were looked up."""
    return sum(len(request.ids) for request in requests if not request.is_put)


def num_distinct(requests: Sequence[Request]) -> int:
    """Distinct blocks of all prompts."""
    return len({block for request in requests for block in request.ids})


def num_prompts(requests: Sequence[Request]) -> int:
    """Prompts; of a recording, runs that were looked up."""
    return sum(1 for request in requests if not request.is_put)


def recorded_ratio(requests: Sequence[Request]) -> float | None:
    """Share of the blocks looked up that the recorded pool had; None if nothing was recorded."""
    hits = [request.hits for request in requests if request.hits is not None]
    return sum(hits) / max(1, num_blocks(requests)) if hits else None
