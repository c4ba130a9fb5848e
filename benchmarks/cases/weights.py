"""How fast are weights digested? The connector reads each file once, when an engine first starts with it.

Sides: the digest of files in the page cache, of the same files when they come from the disk, and the hash alone,
of bytes in memory, by one thread. `content_digest` remembers what it has read; each round has a cache of its own.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.harness.figures import rows
from benchmarks.harness.measuring import Row, alternate, gb_per_s, report, timed

SIZES_GB = {"8B": 16, "70B": 140, "405B": 810}
"""Weights in bfloat16, by number of parameters."""


def table() -> str:
    """How long digests take at the rates of the committed result, in Markdown."""
    lines = ["| weights | from the page cache | from the disk |", "|---|---|---|"]
    for name, size_gb in SIZES_GB.items():
        taken = [
            size_gb / rows("weights")[f"weights digest, from the {source}"][0] for source in ("page cache", "disk")
        ]
        lines.append(f"| {size_gb} GB ({name}, bfloat16) | {taken[0]:.0f} s | {taken[1]:.0f} s |")
    return "\n".join(lines)


def main(
    directory: Annotated[Path, typer.Option(help="On the disk to measure.")] = Path("/var/tmp"),
    mib: Annotated[int, typer.Option(help="Size of all files.", min=64)] = 2048,
    files: Annotated[int, typer.Option(help="Of the checkpoint.", min=1)] = 4,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
) -> None:
    """Measures and reports."""
    from vllm_plugin.model.weights import MAX_THREADS, PIECE_BYTES, content_digest  # The table needs no vLLM.

    nbytes = mib << 20
    piece = np.random.default_rng(0).integers(0, 256, PIECE_BYTES, dtype=np.uint8)
    with tempfile.TemporaryDirectory(dir=directory, prefix="kvpool-weights-") as folder:
        written = [Path(folder) / f"model-{nth}.safetensors" for nth in range(files)]
        for file in written:
            with file.open("wb") as opened:
                for _ in range(nbytes // files // PIECE_BYTES):
                    piece += np.uint8(1)
                    opened.write(piece)
                os.fsync(opened.fileno())

        def digest() -> float:
            with tempfile.TemporaryDirectory() as cache:
                os.environ["XDG_CACHE_HOME"] = cache
                return timed(lambda: content_digest(Path(folder)))

        def digest_cold() -> float:
            for file in written:
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return digest()

        def hash_alone() -> float:
            hasher = hashlib.sha256()
            return timed(lambda: [hasher.update(piece) for _ in range(nbytes // PIECE_BYTES)])

        # A digest from the disk leaves the files in the page cache for the next one.
        measures = {"from the disk": digest_cold, "from the page cache": digest, "SHA-256 alone": hash_alone}
        taken = alternate(measures, rounds, what="digests", warmups=1)
    names = {name: name if "alone" in name else f"weights digest, {name}" for name in measures}
    report(
        "weights",
        [Row(names[name], gb_per_s(nbytes, each), "GB/s") for name, each in taken.items()],
        bytes=nbytes,
        files=files,
        threads=min(MAX_THREADS, len(os.sched_getaffinity(0))),
    )


if __name__ == "__main__":
    typer.run(main)
