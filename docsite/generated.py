"""Pages that are written from the code: `python -m docsite.generated` writes those that are stale.

The commands come from the options that typer has, the RPCs from the descriptors and comments of the proto contract, the
names and defaults of settings from the configuration's fields. The tables of metrics are tests.support.metrics_page's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docsite import cli_page, rpc_page, settings_tables

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
PAGES: Mapping[str, Callable[[str], str]] = {
    "cli.md": cli_page.page,
    "rpcs.md": rpc_page.page,
    "configuration.md": settings_tables.page,
}
"""Page of docs/reference -> its text, given the text that it has."""


def stale() -> dict[Path, str]:
    """The pages that are not what the code gives, with what it gives."""
    pages = {REFERENCE / name: make for name, make in PAGES.items()}
    texts = {path: path.read_text() if path.exists() else "" for path in pages}
    made = {path: make(texts[path]) for path, make in pages.items()}
    return {path: text for path, text in made.items() if text != texts[path]}


def main() -> None:
    """Writes the stale pages, and says which."""
    for path, text in stale().items():
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
