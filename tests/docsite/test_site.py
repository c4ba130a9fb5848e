"""The site is built strictly, its links lead somewhere, it needs no other host, and its search works from files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By

from kvpool.version import __version__
from tests.support.browser import console, start_browser
from tests.support.processes import wait_for

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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    started = start_browser(str(tmp_path_factory.mktemp("chromium")))
    yield started
    started.quit()


@pytest.mark.parametrize(
    ("asked", "found"),
    [("zero hits", "how-to/debug-zero-hits.html"), ("grace_ms", "reference/configuration.html")],
)
def test_the_search_works_without_a_server(browser: WebDriver, site: Path, asked: str, found: str) -> None:
    browser.get(f"file://{site}/index.html")
    box = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
    browser.execute_script("document.querySelector('#__search').click()")
    wait_for(box.is_displayed, "the search's input")
    box.send_keys(asked)
    results = "return [...document.querySelectorAll('.md-search-result__link')].map((each) => each.href)"
    wait_for(
        lambda: any(found in href for href in browser.execute_script(results)), f"a result for {asked!r}", deadline_s=60
    )
    loaded = browser.execute_script("return [...document.querySelectorAll('[src]')].map((each) => each.src)")
    assert loaded and not [name for name in loaded if not name.startswith(("file://", "data:"))]
    # A site that lies alone has no list of versions beside it.
    told = [line["message"] for line in console(browser) if line["level"] == "SEVERE"]
    assert not [message for message in told if "versions.json" not in message]


def test_versions_lie_beside_each_other(tmp_path: Path) -> None:
    """As MAINTAINING.md publishes them, into a branch of another repository."""
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "begin"], cwd=tmp_path, check=True)
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment |= {
        f"GIT_{who}_{what}": "t@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    mike = [str(Path(sys.executable).with_name("mike"))]
    for version in ("0.0.1", __version__):
        command = [*mike, "deploy", "-F", str(ROOT / "mkdocs.yml"), "-b", "site", "--update-aliases", version, "latest"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
    shown = subprocess.run([*git, "show", "site:versions.json"], cwd=tmp_path, capture_output=True, check=True)
    assert {each["version"]: each["aliases"] for each in json.loads(shown.stdout)} == {
        "0.0.1": [],
        __version__: ["latest"],
    }
    for place in ("0.0.1/index.html", f"{__version__}/index.html", "latest"):  # `latest` is a link.
        subprocess.run([*git, "cat-file", "-e", f"site:{place}"], cwd=tmp_path, check=True)


def test_each_picture_is_on_a_page(pages: dict[Path, Page], site: Path) -> None:
    shown = {_target(path, target) for path, page in pages.items() for target in page.loaded}
    pictures = {path for folder in ("images", "plots") for path in (site / folder).iterdir()}
    assert pictures and pictures <= shown
