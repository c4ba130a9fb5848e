"""Reads what `kvpool-server --record` has written: gzip members with JSON lines, described in docs/how-to/size.md.

A recording may end anywhere, because its server was killed or its disk was full: what can be read is used.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.replay.request import LATEST_MS, MAX_BLOCKS, Bounds, Request

MAGIC = b"\x1f\x8b"
VERSION = 1
GZIP = 31
"""`wbits` of zlib for gzip members."""
MAX_LINE_BYTES = 4 << 20
LOOKUP, PUT = "lookup", "put"
READ_BYTES = 1 << 20
MAX_PLAIN_BYTES = 2 << 30
"""Of a recording, decompressed: 1 MB of a file may hold 1 GB."""
_ID_CHARS = 16


def is_recording(path: Path) -> bool:
    """Whether a file is compressed as recordings are."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def load_recording(path: Path) -> list[Request]:
    """The lookups and puts of a recording, each run as one request. Raises ValueError if a line is not as documented.

    A later section's times follow those of the section before.
    """
    requests: list[Request] = []
    started_s = 0.0
    bounds = Bounds()
    for number, line in enumerate(_lines(path), 1):
        try:
            fields = json.loads(line)
            if "kvpool_recording" in fields:
                if fields["kvpool_recording"] != VERSION:
                    raise ValueError(f"version {fields['kvpool_recording']} is not {VERSION}")
                started_s = requests[-1].at_s if requests else 0.0
            elif LOOKUP in fields or PUT in fields:
                requests.append(_request(fields, started_s))
                bounds.add(requests[-1])
            elif "namespace" not in fields:
                raise ValueError("the line is neither a lookup nor a put")
            if number == 1 and "kvpool_recording" not in fields:
                raise ValueError("the first line does not say kvpool_recording")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is no line of a recording ({error})") from None
    return requests


def _request(fields: dict[str, Any], started_s: float) -> Request:
    at_ms, is_put = fields["ms"], PUT in fields
    if not 0 <= at_ms <= LATEST_MS:
        raise ValueError(f"ms {at_ms} is not between 0 and {LATEST_MS:g}")
    ids = _ids(fields[PUT if is_put else LOOKUP])
    parent = _ids(fields.get("parent", ""))
    hits = None if is_put else fields["hits"]
    if hits is not None and (type(hits) is not int or not 0 <= hits <= len(ids)):
        raise ValueError(f"hits {hits!r:.40} is not a whole number from 0 to {len(ids)}")
    return Request(started_s + at_ms / 1000, ids, hits, parent[0] if parent else None, is_put)


def _ids(text: str) -> array[int]:
    """Numbers of 64 bits, which take 8 bytes each."""
    if len(text) % _ID_CHARS or len(text) > _ID_CHARS * MAX_BLOCKS:
        raise ValueError(f"{len(text)} characters are no ids of {_ID_CHARS}, {MAX_BLOCKS:,} ids at most")
    ids = array("Q", bytes.fromhex(text))
    if sys.byteorder == "little":
        ids.byteswap()
    if len(ids) * _ID_CHARS != len(text):
        raise ValueError("the ids have other characters than hexadecimal digits")
    return ids


def _lines(path: Path) -> Iterator[bytes]:
    """The whole lines, as far as the file can be decompressed."""
    rest, num_bytes = b"", 0
    for piece in _pieces(path):
        num_bytes += len(piece)
        if num_bytes > MAX_PLAIN_BYTES:
            raise ValueError(f"{path} has more than {MAX_PLAIN_BYTES >> 30} GiB of text; give its first lines")
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError(f"{path} has a line of more than {MAX_LINE_BYTES:,} bytes; give a recording")
        yield from lines


def _pieces(path: Path) -> Iterator[bytes]:
    """The decompressed bytes of all members, in pieces of `READ_BYTES` at most."""
    with path.open("rb") as file:
        decompressor = zlib.decompressobj(GZIP)
        data = file.read(READ_BYTES)
        while data:
            try:
                piece = decompressor.decompress(data, READ_BYTES)
            except zlib.error:
                return
            if piece:
                yield piece
            if decompressor.eof:
                data, decompressor = decompressor.unused_data or file.read(READ_BYTES), zlib.decompressobj(GZIP)
            else:
                data = decompressor.unconsumed_tail or file.read(READ_BYTES)
