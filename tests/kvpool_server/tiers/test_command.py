"""Directories of servers that have gone: what is deleted, and what never is."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvpool_server.tiers import command
from kvpool_server.tiers.command import app
from kvpool_server.tiers.file import journal
from tests.contracts.tier_contract import TierContract, awaited, blocks_of, namespace_of, opened
from tests.support.file_tier import file_tier
from tests.support.tier_directories import acquire, inspect


def _age(directory: Path) -> None:
    then = time.time() - command.MIN_AGE_S - 60
    os.utime(directory / "lock", (then, then))


@awaited
async def _orphan(directory: Path) -> None:
    """A directory that a server has used and left."""
    async with opened(file_tier(directory.parent, directory.name)) as tier:
        await tier.write(namespace_of(TierContract.spec).groups[0], blocks_of(directory.name))
    _age(directory)


FOREIGN: dict[str, dict[str, bytes]] = {
    "a program's": {"data.db": b"precious"},
    "another journal": {"journal": b"Dear diary, today I have written a journal of my own"},
    "with a note": {"journal": journal.encode_head(4096), "README": b"precious"},
    "with a directory": {"extent-00000/precious": b""},
    "a lock with a process in it": {"lock": b"4711"},
}


def _foreign(kind: str, directory: Path) -> None:
    for name, content in {"lock": b"", **FOREIGN[kind]}.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    _age(directory)


@pytest.mark.parametrize("name", ["other", ".removed-by-hand"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_directory_that_is_no_servers_is_never_deleted(tmp_path: Path, kind: str, name: str) -> None:
    _foreign(kind, tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    (found,) = command.survey(tmp_path)
    assert (found.is_candidate, found.reason) == (False, "not a server's directory")
    assert not command.delete_directory(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_to_a_directory_is_never_deleted(tmp_path: Path) -> None:
    for name in ("elsewhere", "path"):
        (tmp_path / name).mkdir()
    _orphan(tmp_path / "elsewhere" / "dead")
    (tmp_path / "path" / "link").symlink_to(tmp_path / "elsewhere" / "dead")
    (found,) = command.survey(tmp_path / "path")
    assert not found.is_candidate
    assert not command.delete_directory(tmp_path / "path" / "link")
    assert (tmp_path / "path" / "link").is_symlink()


def test_a_server_that_comes_back_after_the_survey_keeps_its_directory(tmp_path: Path) -> None:
    _orphan(tmp_path / "one")
    assert command.survey(tmp_path)[0].is_candidate
    acquire(tmp_path / "one").close()
    assert not command.delete_directory(tmp_path / "one")
    lock = acquire(tmp_path / "one")
    _age(tmp_path / "one")
    with pytest.raises(BlockingIOError):
        command.delete_directory(tmp_path / "one")
    lock.close()
    assert (tmp_path / "one" / "journal").exists()


def _gc(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["gc", *map(str, arguments)], env={"COLUMNS": "200"})


def _rows(result: Result) -> dict[str, list[str]]:
    """The cells of the table by directory."""
    lines = [line.strip("│┃ ") for line in result.stdout.splitlines() if "│" in line]
    rows = [[cell.strip() for cell in line.split("│")] for line in lines]
    return {row[0]: row[1:] for row in rows}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("dead", "interrupted", "running", "young"):
        _orphan(tmp_path / name)
    (tmp_path / "interrupted").rename(tmp_path / ".removed-interrupted-0123")
    acquire(tmp_path / "young").close()
    _foreign("with a note", tmp_path / "foreign")
    (tmp_path / "without lock").mkdir()
    (tmp_path / "a file").touch()
    return tmp_path


def test_gc_lists_every_directory_with_its_reason_and_deletes_the_candidates_alone_if_told_to(root: Path) -> None:
    lock = inspect(root / "running")
    before = sorted(root.rglob("*"))
    result = _gc(root)
    assert result.exit_code == 0 and sorted(root.rglob("*")) == before
    rows = _rows(result)
    assert {name: row[2:] for name, row in rows.items()} == {
        "dead": ["yes", "no server holds its lock"],
        ".removed-interrupted-0123": ["yes", "its deletion was interrupted"],
        "running": ["no", "a running server holds its lock"],
        "young": ["no", "its last heartbeat is younger than 60 min"],
        "foreign": ["no", "not a server's directory"],
        "without lock": ["no", "it has no lock file"],
    }
    assert rows["dead"][0] == "61 min ago" and rows["dead"][1].endswith("KiB")
    assert "candidates: 2 of 6 directories" in result.stdout and "--delete" in result.stdout
    assert "candidates: 1 of 6" in _gc(root, "--min-age-s", 10_000).stdout
    assert _gc(root, "--min-age-s", 1).exit_code == 2, "a running server on another host would be a candidate"
    assert _gc(root / "nothing").exit_code == 2
    result = _gc(root, "--delete")
    lock.close()
    assert result.exit_code == 0 and "deleted 2 of 2 candidates" in result.stdout
    assert sorted(path.name for path in root.iterdir()) == ["a file", "foreign", "running", "without lock", "young"]
    assert (root / "foreign" / "README").exists() and (root / "running" / "journal").exists()
    with pytest.raises(FileNotFoundError):
        command.delete_directory(root / "without lock")
    assert not list((root / "without lock").iterdir())


def test_gc_says_what_it_could_not_delete(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(directory: Path, min_age_s: float) -> bool:
        if directory.name == "dead":
            raise PermissionError(13, "Permission denied")
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(command, "delete_directory", busy)
    result = _gc(root, "--delete")
    assert result.exit_code == 1 and "deleted 0 of 3" in result.stdout
    assert "dead cannot be deleted: Permission denied" in result.output
    assert "a server has locked" in result.output


@awaited
async def test_a_server_deletes_nobodys_directory(root: Path) -> None:
    before = sorted(root.iterdir())
    async with opened(file_tier(root)) as tier:
        await tier.refresh()
        hashes = [blocks_of("dead")[0].block_hash]
        known = tier.known(namespace_of(TierContract.spec).groups[0], hashes)
        assert known == [True], "blocks of a server that has gone can be read"
    assert sorted(root.iterdir()) == sorted([*before, root / "one"])


def test_gc_deletes_nothing_where_others_can_write(root: Path) -> None:
    before = sorted(root.rglob("*"))
    (root / "dead").chmod(0o770)
    assert _rows(_gc(root))["dead"][2:] == ["no", "not a server's directory"]
    root.chmod(0o1777)
    result = _gc(root, "--delete")
    assert result.exit_code == 1 and "can be written by others" in result.output
    assert sorted(root.rglob("*")) == before


def test_gc_opens_no_pipe_and_follows_no_link(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    precious = tmp_path_factory.mktemp("precious") / "extent-00000"
    precious.touch()
    (root / "dead" / "extent-00001").symlink_to(precious)
    os.mkfifo(root / ".removed-interrupted-0123" / "extent-00001")
    before = sorted(path for name in ("dead", ".removed-interrupted-0123") for path in (root / name).iterdir())
    assert _gc(root, "--delete").exit_code == 0
    assert precious.exists() and all(path.lstat() for path in before)
