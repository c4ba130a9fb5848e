"""Records what releases of vLLM require of packages that kvpool requires, too.

`python -m tests.package.vllm_requirements 0.34.0` reads it from the wheel on the package index: a few hundred kilobytes
of the wheel, for which it asks by ranges.
"""

from __future__ import annotations

import io
import json
import re
import sys
import urllib.request
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_suffix(".json")
INDEX = "https://pypi.org/simple/vllm/"
TIMEOUT_S = 60.0


class RemoteFile(io.RawIOBase):
    """A file on a web server, read by ranges."""

    def __init__(self, url: str):
        self._url = url
        self._position = 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_S) as reply:
            self._num_bytes = int(reply.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        end = min(self._position + len(buffer), self._num_bytes)
        if end <= self._position:
            return 0
        wanted = {"Range": f"bytes={self._position}-{end - 1}"}
        with urllib.request.urlopen(urllib.request.Request(self._url, headers=wanted), timeout=TIMEOUT_S) as reply:
            assert reply.status == 206, f"{self._url}: the index answers no ranges (status {reply.status})"
            part = reply.read()
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


def shared_packages() -> set[str]:
    """What kvpool requires, directly or not, with the extra `directory` alone."""
    lines = (ROOT / "requirements" / "runtime.txt").read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]) for line in lines if re.match(r"\w", line)}


def requirements_of(version: str) -> dict[str, str | list[str]]:
    """`python` and `packages` of one release's wheel."""
    asked = urllib.request.Request(INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as reply:
        files = json.load(reply)["files"]
    wheels = [each for each in files if each["filename"].endswith("x86_64.whl")]
    (url,) = (each["url"] for each in wheels if parse_wheel_filename(each["filename"])[1] == Version(version))
    with ZipFile(io.BufferedReader(RemoteFile(url), 1 << 20)) as wheel:
        metadata = message_from_string(wheel.read(f"vllm-{version}.dist-info/METADATA").decode())
    lines = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    shared = [line for line in lines if canonicalize_name(Requirement(line).name) in shared_packages()]
    return {"python": metadata["Requires-Python"], "packages": sorted(shared)}


def main() -> None:
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record.update({version: requirements_of(version) for version in sys.argv[1:]})
    RECORD.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
