"""Servers on one path: what one must not do to another, nor to whatever else lies there."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvpool_server.cache.eviction.lru import PrefixLRU
from kvpool_server.cache.namespaces import Namespace
from kvpool_server.tiers.file import journal, orphans
from kvpool_server.tiers.file import peer_directories as peers
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.extents import Extents
from kvpool_server.tiers.file.lock import DirectoryGoneError, DirectoryLock, take
from kvpool_server.tiers.file.open_files import OpenFiles
from kvpool_server.tiers.file.tier import FileTier
from kvpool_server.tiers.tier import TierError
from tests.contracts.tier_contract import SLOT, Memory, TierContract, blocks_of, namespace_of, run
from tests.support.values import block_hash

SIZE = 8 << 20
LONG_AGO_S = orphans.ORPHANED_S + 60


def _tier(root: Path, owner: str = "one", files: OpenFiles | None = None) -> FileTier:
    return FileTier(root, owner, SIZE, PrefixLRU, threads=2, direct=False, files=files or OpenFiles())


@pytest.fixture
def namespace() -> Namespace:
    return namespace_of(TierContract.spec)


def _age(directory: Path) -> None:
    then = time.time() - LONG_AGO_S
    os.utime(directory / "lock", (then, then))


async def _store(root: Path, owner: str, namespace: Namespace, names: Sequence[str]) -> None:
    tier = _tier(root, owner)
    await tier.open()
    await tier.write(namespace, 0, blocks_of(*names))
    await tier.close()


async def _read(tier: FileTier, namespace: Namespace, names: Sequence[str]) -> list[bool]:
    memory = Memory(len(names))
    return [
        sums is not None for sums in await tier.read(namespace, 0, [block_hash(name) for name in names], memory.views)
    ]


def _known(tier: FileTier, namespace: Namespace, *names: str) -> list[bool]:
    return tier.known(namespace, 0, [block_hash(name) for name in names])


# Directories that nobody owns


def _foreign(kind: str, directory: Path) -> None:
    directory.mkdir()
    (directory / "lock").touch()
    if kind == "a program's":
        (directory / "data.db").write_text("precious")
    elif kind == "another journal":
        (directory / "journal").write_text("Dear diary, today I have written a journal of my own")
    elif kind == "with a note":
        (directory / "journal").write_bytes(journal.head(4096))
        (directory / "README").write_text("precious")
    elif kind == "with a directory":
        (directory / "extent-00000").mkdir()
        (directory / "extent-00000" / "precious").touch()
    else:
        (directory / "lock").write_text("4711")
    _age(directory)


KINDS = ["a program's", "another journal", "with a note", "with a directory", "a lock with a process in it"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_is_no_servers_stays(tmp_path: Path, kind: str) -> None:
    _foreign(kind, tmp_path / "other")
    before = sorted(tmp_path.rglob("*"))

    async def test() -> None:
        one = _tier(tmp_path)
        await one.open()
        await one._look_around()
        await one.close()

    run(test)
    assert [path for path in sorted(tmp_path.rglob("*")) if "one" not in path.parts] == before


def test_a_link_to_a_directory_stays(tmp_path: Path) -> None:
    take(tmp_path / "elsewhere").close()
    _age(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert not orphans.remove(tmp_path / "link")
    assert (tmp_path / "link" / "lock").exists()


def test_a_directory_that_is_being_removed_is_nobodys_and_is_finished_by_the_next(
    tmp_path: Path, namespace: Namespace
) -> None:
    async def test() -> None:
        await _store(tmp_path, "dead", namespace, "ab")
        (tmp_path / "dead").rename(tmp_path / ".removed-dead-0123")
        _foreign("with a note", tmp_path / ".removed-by-hand")
        one = _tier(tmp_path)
        await one.open()
        await one._look_around()
        assert sorted(path.name for path in tmp_path.iterdir()) == [".removed-by-hand", "one"]
        assert (tmp_path / ".removed-by-hand" / "README").exists()
        await one.close()

    run(test)


def test_who_starts_while_a_directory_is_removed_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "one"
    take(directory).close()
    import fcntl

    really = fcntl.flock

    def removed_meanwhile(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", really)
        directory.rename(tmp_path / ".removed-one-1")
        really(fd, operation)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    lock = take(directory)
    assert os.path.samestat(os.fstat(lock._fd), (directory / "lock").stat())
    lock.close()


def test_a_directory_that_goes_while_it_is_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = Path.mkdir

    def gone_meanwhile(path: Path, **options: bool) -> None:
        monkeypatch.setattr(Path, "mkdir", really)
        raise FileExistsError(17, "File exists", str(path))

    monkeypatch.setattr(Path, "mkdir", gone_meanwhile)
    take(tmp_path / "one").close()
    assert (tmp_path / "one" / "lock").exists()


def test_who_comes_back_before_the_lock_is_had_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remover looks at the age again once it has the lock: an owner may have come and gone."""
    directory = tmp_path / "one"
    take(directory).close()
    _age(directory)
    assert orphans.is_orphaned(directory)
    take(directory).close()
    assert not orphans.remove(directory)
    assert directory.exists()


def test_an_owner_shows_at_once_that_it_lives(tmp_path: Path) -> None:
    take(tmp_path / "one").close()
    _age(tmp_path / "one")
    DirectoryLock(tmp_path / "one").close()
    assert not orphans.is_orphaned(tmp_path / "one")


def test_a_lock_of_a_directory_that_has_gone_says_so(tmp_path: Path) -> None:
    lock = take(tmp_path / "one")
    lock.give_sign_of_life()
    (tmp_path / "one").rename(tmp_path / "two")
    with pytest.raises(DirectoryGoneError):
        lock.give_sign_of_life()
    take(tmp_path / "one").close()
    with pytest.raises(DirectoryGoneError):
        lock.give_sign_of_life()
    lock.close()


def test_a_server_whose_directory_has_gone_does_not_pretend(tmp_path: Path, namespace: Namespace) -> None:
    async def test() -> None:
        tier = _tier(tmp_path)
        await tier.open()
        await tier.write(namespace, 0, blocks_of("a"))
        (tmp_path / "one").rename(tmp_path / ".gone")
        with capture_logs() as logs:
            for _ in range(3):
                await tier._look_around()
        assert [line["event"] for line in logs] == ["a tier's directory has gone, and the tier with it"]
        assert _known(tier, namespace, "a") == [False]
        with pytest.raises(TierError, match="was removed or replaced"):
            await tier.write(namespace, 0, blocks_of("b"))
        with pytest.raises(TierError, match="was removed or replaced"):
            await _read(tier, namespace, "a")
        (tmp_path / ".gone").rename(tmp_path / "one")
        await tier._look_around()
        assert await _read(tier, namespace, "a") == [True]
        await tier.close()

    run(test)


# What is wrong with a peer


def _frame_of_nonsense() -> bytes:
    return journal._frame(journal.NAMESPACE, b"{not json")


HARMS = {
    "a frame of nonsense": lambda path: path.write_bytes(journal.head(4096) + _frame_of_nonsense()),
    "another version": lambda path: path.write_bytes(journal._frame(journal.HEAD, journal._HEAD.pack(99, 4096))),
    "a pipe": lambda path: os.mkfifo(path),
    "a directory": lambda path: path.mkdir(),
    "a loop": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("harm", sorted(HARMS))
def test_what_is_wrong_with_one_neighbour_is_said_once_and_harms_nobody(
    tmp_path: Path, namespace: Namespace, harm: str
) -> None:
    async def test() -> None:
        for name in "abcdefgh":  # Whatever the order of the directory: some come after it.
            await _store(tmp_path, name, namespace, [f"of {name}"])
        bad = tmp_path / "bad"
        take(bad).close()
        HARMS[harm](bad / "journal")
        (tmp_path / "lost+found").symlink_to("lost+found")
        one = _tier(tmp_path)
        with capture_logs() as logs:
            await one.open()
            for _ in range(4):
                await one._look_around()
        names = [f"of {name}" for name in "abcdefgh"]
        assert _known(one, namespace, *names) == [True] * 8
        assert await _read(one, namespace, names) == [True] * 8
        said = [line for line in logs if line["log_level"] == "warning"]
        assert [line.get("directory") for line in said].count(str(bad)) == 1
        assert len(said) <= 2
        await one.close()

    run(test)


def test_a_neighbours_read_error_is_a_miss_and_the_block_is_not_there_until_its_journal_says_so(
    tmp_path: Path, namespace: Namespace
) -> None:
    async def test() -> None:
        two, one = _tier(tmp_path, "two"), _tier(tmp_path)
        await two.open()
        await two.write(namespace, 0, blocks_of("a", "b"))
        await one.open()
        await one._look_around()
        assert _known(one, namespace, "a", "b") == [True, True]

        def bad_sector(*_: object) -> int:
            raise OSError(5, "Input/output error")

        one._disk.read = bad_sector  # type: ignore[method-assign]
        assert await _read(one, namespace, "ab") == [False, False]
        del one._disk.read
        assert _known(one, namespace, "a", "b") == [False, False], "still believed"
        assert await one.write(namespace, 0, blocks_of("a")) == 1
        assert one.holdings(namespace.fingerprint).num_entries == 1
        await two.remove(namespace, 0, [block_hash("b")])
        await two.write(namespace, 0, blocks_of("b"))
        await one._look_around()
        assert _known(one, namespace, "b") == [True], "its owner has stored it anew"
        assert await _read(one, namespace, "ab") == [True, True]
        await one.close()
        await two.close()

    run(test)


def test_a_journal_that_goes_no_further_is_not_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "journal").write_bytes(journal.head(4096) + b"no frame" * 100)
    peer = peers.PeerDirectory(tmp_path, lambda nbytes: Extents(tmp_path, nbytes, Disk(), OpenFiles(), **_FLAGS))
    reads: list[int] = []
    really = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: (reads.append(at), really(fd, size, at))[1])
    for _ in range(100):
        peer.refresh()
    assert len(reads) < 12
    monkeypatch.undo()
    spec = TierContract.spec
    (tmp_path / "new").write_bytes(journal.head(4096) + journal.opened(spec))
    (tmp_path / "new").rename(tmp_path / "journal")
    peer.refresh()
    assert peer._inventory.specs == {spec.fingerprint(): spec}, "another one is read at once"
    peer.close()


_FLAGS = {"writable": False, "direct": False}


def test_whatever_fails_the_tier_looks_around_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_server.tiers.file.tier.LOOK_AROUND_S", 0.001)
    looks: list[int] = []

    def fails() -> None:
        looks.append(1)
        raise RuntimeError("no one has thought of this")

    async def test() -> None:
        tier = _tier(tmp_path)
        tier._peers.refresh = fails  # type: ignore[method-assign]
        with capture_logs() as logs:
            await tier.open()
            while len(looks) < 5:
                await asyncio.sleep(0.001)
            await tier.close()
        assert len([line for line in logs if line["log_level"] == "warning"]) == 1

    run(test)


def test_a_server_starts_before_it_has_read_what_others_have(
    tmp_path: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their journals may be large, and their file system may hang."""
    monkeypatch.setattr("kvpool_server.tiers.file.tier.CLOSE_S", 0.1)
    import threading

    hangs = threading.Event()

    async def test() -> None:
        tier = _tier(tmp_path)
        tier._peers.refresh = lambda: hangs.wait(30)  # type: ignore[assignment, method-assign, return-value]
        async with asyncio.timeout(5):
            await tier.open()
            assert await tier.write(namespace, 0, blocks_of("a")) == 1
            await tier.close()

    run(test)
    hangs.set()


# Descriptors


def _extents(directory: Path, files: OpenFiles, closed: list[int] | None = None) -> Extents:
    disk = Disk()
    if closed is not None:
        really = disk.close
        disk.close = lambda fd: (closed.append(fd), really(fd))[1]  # type: ignore[method-assign]
    return Extents(directory, SLOT, disk, files, writable=True, direct=False)


def test_closed_extents_open_nothing_and_leave_what_is_in_use_to_its_users(tmp_path: Path) -> None:
    closed: list[int] = []
    files = OpenFiles()
    extents = _extents(tmp_path, files, closed)
    memory = Memory(1)
    extents.write(0, memory.views)
    with extents._file(0, 0, memory.views) as fd:
        extents.close()
        assert os.fstat(fd).st_size == SLOT and not closed, "closed under a reader"
    assert closed == [fd]
    assert not extents.read(0, memory.views)
    with pytest.raises(OSError, match="closed"):
        extents.write(0, memory.views)
    assert not files.handles


def test_a_file_that_was_being_opened_when_all_was_closed_does_not_stay_open(tmp_path: Path) -> None:
    closed: list[int] = []
    files = OpenFiles()
    extents = _extents(tmp_path, files, closed)
    really = extents._disk.open
    opened: list[int] = []

    def slow(path: Path, flags: int) -> int:
        opened.append(really(path, flags))
        extents.close()
        return opened[0]

    extents._disk.open = slow  # type: ignore[method-assign]
    assert not extents.read(0, Memory(1).views)
    assert closed == opened and len(opened) == 1 and not files.handles


def test_all_directories_share_one_number_of_descriptors(tmp_path: Path) -> None:
    files, closed, memory = OpenFiles(3), [], Memory(1)
    for nth in range(4):
        (tmp_path / str(nth)).mkdir()
    several = [_extents(tmp_path / str(nth), files, closed) for nth in range(4)]
    for extents in several:
        for idx in range(2):
            extents.write(idx * SLOT, memory.views)
            assert len(files.handles) <= 3
    assert len(closed) == 5
    for extents in several:
        extents.close()
    assert len(closed) == 8


def test_a_tier_asks_for_as_many_descriptors_as_there_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    async def opened_and_closed() -> None:
        tier = _tier(tmp_path)
        await tier.open()
        await tier.close()

    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    for soft, hard in [(1024, 4096), (1024, 1 << 20), (1024, resource.RLIM_INFINITY), (1 << 17, 1 << 20), (64, 64)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=(soft, hard): limits)
        run(opened_and_closed)
    assert asked == [(4096, 4096), (65_536, 1 << 20), (65_536, resource.RLIM_INFINITY)]
