"""The page's files: a fixed table, read once, compressed once. No request names a path of the file system."""

from __future__ import annotations

import gzip
import hashlib
import importlib.resources
from dataclasses import dataclass

_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
NAMES = (
    "index.html",
    "page.css",
    "page.js",
    "panels.js",
    "charts.js",
    "chart.js",
    "samples.js",
    "format.js",
    "source.js",
    "uPlot/uPlot.iife.min.js",
    "uPlot/uPlot.min.css",
)
"""What is served of `kvpool_server/page/static`: index.html at /, the others under /page/."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file as HTTP sends it."""

    body: bytes
    gzipped: bytes
    content_type: str
    etag: str


def read_static_files() -> dict[str, StaticFile]:
    """The files by the path of their URL."""
    root = importlib.resources.files("kvpool_server.page") / "static"
    files = {}
    for name in NAMES:
        body = root.joinpath(*name.split("/")).read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        path = "/" if name == "index.html" else f"/page/{name}"
        files[path] = StaticFile(body, gzip.compress(body, mtime=0), _TYPES[name.rpartition(".")[2]], etag)
    return files
