"""The site is built strictly, its links lead somewhere, and it needs no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
"""Element -> the attribute that names what a browser loads for it."""


class Page(HTMLParser):
    """What a page of the site links to, loads and names."""

    def __init__(self, text: str):
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := found.get(name))}
        if tag == "a" and (href := found.get("href")):
            self.links.add(href)
        if (name := LOADED.get(tag)) and (target := found.get(name)) and found.get("rel") not in ("next", "prev"):
            self.loaded.add(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it."""
    directory = tmp_path_factory.mktemp("site")
    paths = ["-f", str(ROOT / "mkdocs.yml"), "-d", str(directory)]
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *paths]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    return directory


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_every_page_is_reached_from_the_first(pages: dict[Path, Page], site: Path) -> None:
    open_pages, reached = [site / "index.html"], {site / "index.html"}
    while open_pages:
        here = open_pages.pop()
        for link in pages[here].links:
            target = _target(here, link)
            if target in pages and target not in reached:
                reached.add(target)
                open_pages.append(target)
    assert pages.keys() - reached <= {site / "404.html"}
    assert len(reached) > 30


def test_every_link_and_anchor_leads_somewhere(pages: dict[Path, Page], site: Path) -> None:
    broken = []
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            if re.match(r"[a-z]+:", link) or (path.name == "404.html" and link.startswith("/")):
                continue
            target, anchor = _target(path, link), unquote(urldefrag(link).fragment)
            named = pages[target].ids if target in pages else set()
            if not target.is_file() or (anchor and anchor not in named and target.suffix == ".html"):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_nothing_is_loaded_from_another_host(pages: dict[Path, Page], site: Path) -> None:
    assert not {target for page in pages.values() for target in page.loaded if "//" in target}
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\"']*", sheet.read_text()), sheet
    for picture in site.rglob("*.svg"):
        assert not re.findall(r"(?:url\(|href=)[\"']?https?://[^)\"']*", picture.read_text()), picture


def _target(page: Path, link: str) -> Path:
    path = unquote(urldefrag(link).url)
    return Path(os.path.normpath(page.parent / path)) if path else page
