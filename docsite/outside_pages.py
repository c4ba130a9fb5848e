"""A hook of MkDocs: the site also has pages made from the code, and what the pages link to outside of docs/.

CONTRIBUTING.md, other pages of the repository's root and the pages of results become pages below `project/`, and files
that a page links to, like the proto contract, are copied below `source/`. Links are the same in the repository and on
the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docsite import cli_page, rpc_page

ROOT = Path(__file__).parents[1]
PAGES = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "MAINTAINING.md", "README.md", "SECURITY.md"),
    *(f"benchmarks/results/{path.name}" for path in (ROOT / "benchmarks" / "results").glob("*.md")),
)
MADE = {"reference/cli.md": cli_page.page, "reference/rpcs.md": rpc_page.page}
"""Pages that the site alone has, made from the options of typer and from the comments of the proto contract."""
_LINK = re.compile(r"(?P<before>\]\()(?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for name, make in MADE.items():
        files.append(File.generated(config, name, content=make()))
    for name in PAGES:
        if (ROOT / name).exists():
            files.append(File.generated(config, _place(name), content=(ROOT / name).read_text()))
    for page in list(files.documentation_pages()):
        for found in _LINK.finditer(page.content_string):
            path = _in_repository(page.src_uri, found["path"])
            is_source = not path.startswith("docs/") and not path.endswith(".md") and (ROOT / path).is_file()
            if is_source and files.get_file_from_path(_place(path)) is None:
                files.append(File.generated(config, _place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Has links out of docs/ lead to where the site has their targets."""

    def linked(found: re.Match[str]) -> str:
        path = _in_repository(page.file.src_uri, found["path"])
        target = path.removeprefix("docs/") if path.startswith("docs/") else _place(path)
        if files.get_file_from_path(target) is None:
            return found[0]  # MkDocs names links that lead nowhere.
        relative = os.path.relpath(target, PurePosixPath(page.file.src_uri).parent)
        return f"{found['before']}{relative}{found['anchor'] or ''})"

    return _LINK.sub(linked, markdown)


def _in_repository(page: str, link: str) -> str:
    """The path of a link's target in the repository, of a page by its path on the site."""
    name = PurePosixPath(page)
    of_root = {_place(each): each for each in PAGES}
    here = PurePosixPath(of_root[page]).parent if page in of_root else "docs" / name.parent
    return os.path.normpath(here / link)


def _place(path: str) -> str:
    """Where the site has a file that is outside of docs/."""
    return f"project/{path.lower()}" if path in PAGES else f"source/{path}"
