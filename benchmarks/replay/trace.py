"""Traces: the blocks of a service's prompts, and when each prompt came.

A trace is a recording of `kvpool-server --record` (see `recording`), or a file of JSON lines, each with `timestamp`
(ms) and `hash_ids` (one id for each block; equal ids mean equal prefixes), the format of the traces published with the
Mooncake paper.

Source of the format: Qin et al., Mooncake, FAST '25.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.recording import is_recording, load_recording
from benchmarks.replay.request import LATEST_MS, MAX_BLOCKS, Bounds, Request
from kvpool.protocol.types import HASH_BYTES

MAX_ID = 1 << 8 * HASH_BYTES
MAX_LINE_BYTES = 8 << 20


def load(path: Path) -> list[Request]:
    """Reads a trace. Raises ValueError if the file is not text, or a line is not a request."""
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
