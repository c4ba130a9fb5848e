"""The documents say what the code does: each setting, series and named test exists, and the tour runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import kvpool
from docsite import settings_tables
from kvpool.cli import app
from kvpool.security.tls import TlsFiles
from kvpool.transport.helpers import movers_of
from kvpool_server.tiers.registry import KINDS
from tests.conftest import StartServer
from tests.support import metrics_page
from tests.support.processes import ServerProcess, run_command

ROOT = Path(__file__).parent.parent
KVPOOL = str(Path(sys.executable).with_name("kvpool"))
DOCS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])


EXPLANATION = ROOT / "docs" / "explanation"


def _section(name: str, heading: str) -> str:
    """The part of a document under one heading."""
    text = (ROOT / "docs" / name).read_text()
    return text.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]


def _table(section: str) -> dict[str, str]:
    """First column -> second column of a section's table."""
    return dict(re.findall(r"^\| `([^`]+)` \| `?([^`|]*?)`? \|", section, re.MULTILINE))


def test_the_tables_of_settings_are_current():
    text = settings_tables.PAGE.read_text()
    assert settings_tables.page(text) == text, "python -m docsite.settings_tables"


def test_every_command_has_a_section_and_a_row():
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    command: Any = typer.main.get_command(app)
    names = {*command.commands, "tier"}
    assert set(re.findall(r"^## (\S+)$", page, re.MULTILINE)) - {"JSON"} == names
    assert all(f"[`{name}`](#{name})" in page.partition("\n## ")[0] for name in names)


def test_each_public_name_is_in_the_reference_of_python():
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    errors = {name for name in kvpool.__all__ if name.endswith("Error")}
    told = set(re.findall(r"^::: kvpool\.\w+\.\w+\.(\w+)$", page, re.MULTILINE))
    assert all(hasattr(kvpool, name) for name in kvpool.__all__) and {*kvpool.__all__} <= {*dir(kvpool)}
    assert {*kvpool.__all__} - errors - {"__version__"} <= told and "::: kvpool.protocol.errors\n" in page


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_of_a_tier_is_documented_with_its_default(kind: str):
    options = KINDS[kind]
    _, heading, rest = _section("reference/configuration.md", "Tiers").partition(f"| `{kind}:")
    assert heading, f"docs/reference/configuration.md has no table of the options of {kind}:"
    table = _table(rest.split("\n\n", 1)[0])
    for name, field in options.model_fields.items():
        if name == options.PLACE:
            continue
        default = table.pop(name)
        if field.is_required():
            assert default == "must be given", name
        elif field.default != "":  # The table says what an empty default means.
            assert default == ("no" if field.default is False else str(field.default)), name
    assert not table


def test_the_table_of_the_servers_metrics_is_current():
    page = metrics_page.PAGE.read_text()
    rows = metrics_page.server_rows()
    assert page == metrics_page.refreshed(page, "server metrics", rows), "python -m tests.support.metrics_page"


@pytest.mark.vllm
def test_the_table_of_the_engines_metrics_is_current():
    page = metrics_page.PAGE.read_text()
    rows = metrics_page.engine_rows()
    assert page == metrics_page.refreshed(page, "engine metrics", rows), "python -m tests.support.metrics_page"


def test_the_tour_runs(shared_server: ServerProcess):
    (tour,) = _examples(_tour_section(), "python")
    _run_tour(tour, shared_server)


def test_the_tour_runs_with_tls(pool_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    plain, with_tls = _section("reference/python.md", "A tour").split("\n### With TLS\n")
    (tour,), (config,) = _examples(plain, "python"), _examples(with_tls, "python")
    (shell,) = _examples(with_tls, "bash")
    make_certificates, serve = map(shlex.split, shell.splitlines())
    ran = run_command(KVPOOL, *make_certificates[1:])
    assert ran.returncode == 0, ran.stderr
    mine = TlsFiles.in_directory("pki/tenants/acme/engine-write")
    server = pool_server(*serve[1:], "--memory", "64MiB", tls=mine)
    tour, changed = re.subn("^config = .*\n", config, tour, count=1, flags=re.MULTILINE)
    assert changed
    _run_tour(tour, server)
    ran = run_command(KVPOOL, "--tls", "pki/operator", "namespaces", "--endpoint", server.endpoint)
    assert "tenant acme" in ran.stdout, ran.stderr


def _tour_section() -> str:
    """What the page says of the tour before its first part."""
    return _section("reference/python.md", "A tour").split("\n### ", 1)[0]


def _examples(section: str, language: str) -> list[str]:
    """The code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def _run_tour(tour: str, server: ServerProcess) -> None:
    ran = run_command(sys.executable, "-c", tour, timeout_s=30, KVPOOL_ENDPOINT=server.endpoint)
    assert ran.returncode == 0, ran.stderr
    assert "6 blocks became readable" in ran.stdout
    assert "6 of 6 blocks hit" in ran.stdout


def test_the_table_of_connections_is_what_clients_take():
    rows = re.findall(r"^\|" + r" (\d+) \|" * 3 + "$", _section("how-to/transports.md", "The data port"), re.MULTILINE)
    assert len(rows) == 5
    for cores, ranks, connections in (map(int, row) for row in rows):
        assert connections == movers_of(cores, ranks)


@pytest.mark.parametrize(
    "page",
    [ROOT / "CONTRIBUTING.md", *(EXPLANATION / f"{name}.md" for name in ("architecture", "design", "testing"))],
    ids=lambda path: path.name,
)
def test_files_and_folders_that_are_named_exist(page: Path):
    """A page may leave out the first folders of a path."""
    named = set(re.findall(r"`([\w./-]+(?:\.(?:py|proto|md|toml)|/))`", page.read_text()))
    named = {path for path in named if "NAME" not in path}
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    missing = [path for path in named if not any(f"/{path.rstrip('/')}/" in f"/{file}/" for file in files)]
    assert named and not missing


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path):
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            found = document.parent / path if path else document
            assert found.exists(), target
            assert not anchor or anchor in _anchors(found), target


def _anchors(document: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
