"""A digest of a model's weights, so that equal weights share blocks wherever they lie, and other weights never do.

Every byte counts: a fine-tune may change one layer, or a few rows. Hub snapshots name their files by content already;
other files are read once (they are in the page cache: the engine loads them, too) and remembered by inode, size, time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import xxhash
from vllm.logger import init_logger

logger = init_logger("vllm.kvpool.weights")

READ_BYTES = 16 << 20
LOCK_TIMEOUT_S = 120.0
LOCK_POLL_S = 0.05
_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.py")


def weights_digest(model: str, revision: str | None) -> str:
    """Digest of the weights of a model that lies on this disk; "" where it does not.

    Args:
        model: a directory, a file, or a hub name that is in the local cache.
    """
    files = _files(model, revision)
    if not files:
        return ""
    digest = hashlib.sha256()
    for name, content in zip((path.name for path in files), _contents(files), strict=True):
        digest.update(f"{name}:{content};".encode())
    return digest.hexdigest()


def _files(model: str, revision: str | None) -> list[Path]:
    path = Path(model)
    if path.is_file():
        return [path]
    if not path.is_dir():
        try:
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except Exception:
            return []  # Not a hub model, or not on this disk: its name and revision must do.
    return sorted({file for pattern in _PATTERNS for file in path.glob(pattern)})


def _contents(files: list[Path]) -> list[str]:
    """What names each file's content. The lock lets one of an engine's processes read, and the others reuse."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvpool" / "weights.json"
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        lock = cache.with_suffix(".lock").open("w")
    except OSError:
        return [_content(file, {}) for file in files]
    with lock:
        _lock(lock)
        known: dict[str, str] = {}
        with suppress(OSError, ValueError):
            known = json.loads(cache.read_text())
        before = dict(known)
        contents = [_content(file, known) for file in files]
        if known != before:
            with suppress(OSError):
                fresh = cache.with_suffix(".new")
                fresh.write_text(json.dumps(known))
                fresh.replace(cache)
    return contents


def _lock(file: IO[str]) -> None:
    """Waits for its turn, but not for ever: without it the work is done twice, and that is all."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(LOCK_POLL_S)


def _content(file: Path, known: dict[str, str]) -> str:
    blob = file.resolve()
    if blob.parent.name == "blobs":
        return blob.name  # The hub's cache names blobs by their SHA-256.
    state = blob.stat()
    key = f"{blob}:{state.st_dev}:{state.st_ino}:{state.st_size}:{state.st_mtime_ns}"
    if key not in known:
        hasher = xxhash.xxh3_128()
        with blob.open("rb") as opened:
            while piece := opened.read(READ_BYTES):
                hasher.update(piece)
        known[key] = hasher.hexdigest()
    return known[key]
