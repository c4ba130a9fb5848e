"""The page's files: which there are, and that they are what they should be."""

from __future__ import annotations

import hashlib
import importlib.resources
import re
import tomllib
from pathlib import Path

from kvpool_server.page.site import NAMES, read_static_files

ROOT = Path(__file__).parents[3]
STATIC = importlib.resources.files("kvpool_server.page") / "static"
MAX_BYTES = 300 << 10


def _text(name: str) -> str:
    return STATIC.joinpath(*name.split("/")).read_text()


def test_the_table_has_each_file() -> None:
    files = read_static_files()
    assert set(files) == {"/", *(f"/page/{name}" for name in NAMES if name != "index.html")}
    for name in NAMES:
        file = files["/" if name == "index.html" else f"/page/{name}"]
        assert file.body == _text(name).encode()
    on_disk = {str(path.relative_to(str(STATIC))) for path in Path(str(STATIC)).rglob("*") if path.is_file()}
    assert on_disk - set(NAMES) == {"uPlot/README.md", "uPlot/LICENSE"}


def test_an_installed_wheel_has_them() -> None:
    """setuptools packs what the patterns of package-data name, relative to their package."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = Path(str(STATIC)).parent
    packed = {path for pattern in data["kvpool_server.page"] for path in package.glob(pattern) if path.is_file()}
    assert {package / "static" / name for name in (*NAMES, "uPlot/README.md", "uPlot/LICENSE")} <= packed


def test_all_of_it_is_small() -> None:
    assert sum(len(file.body) for file in read_static_files().values()) < MAX_BYTES


def test_the_charting_library_is_the_one_that_its_readme_names() -> None:
    readme = _text("uPlot/README.md")
    sums = dict(re.findall(r"^\| `(\S+)` \| `([0-9a-f]{64})` \|$", readme, re.MULTILINE))
    assert sums.keys() == {"uPlot.iife.min.js", "uPlot.min.css", "LICENSE"}
    for name, digest in sums.items():
        assert hashlib.sha256((STATIC / "uPlot" / name).read_bytes()).hexdigest() == digest, name
    (version,) = re.findall(r"^# uPlot (\S+)$", readme, re.MULTILINE)
    assert f"(v{version})" in _text("uPlot/uPlot.iife.min.js")[:100]


def test_no_file_writes_markup_or_asks_other_hosts() -> None:
    for name in NAMES:
        if name.startswith("uPlot/"):
            continue
        text = _text(name)
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
            assert forbidden not in text, (name, forbidden)
        found = set(re.findall(r"(?:https?:)?//[a-z][\w.-]+", text))
        # The name of SVG's markup, which is no address, and a link to the documents.
        assert found <= {"http://www.w3.org", "https://github.com"}, name
    assert re.findall(r"<[^>]*https://github.com", _text("index.html")) == ['<a href="https://github.com']
    assert not re.search(r"<script(?![^>]* src=)|\son\w+=|\sstyle=|<style", _text("index.html"))


def test_each_colour_stands_once_with_its_light_and_its_dark_value() -> None:
    names = re.findall(r"^\s*(--[\w-]+):", _text("page.css"), re.MULTILINE)
    assert names and len(names) == len(set(names))
    assert len(re.findall(r"light-dark\(#\w+, #\w+\)", _text("page.css"))) == len(names)
