"""A file tier beside an intruder who can write below its path, or next to it."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvpool.protocol.errors import ConfigError
from kvpool_server.cache.eviction.policy import PrefixLRU
from kvpool_server.tiers.file.directory import Directory, DirectoryLock, UntrustedFileError
from kvpool_server.tiers.file.peer_directories import PeerDirectories
from kvpool_server.tiers.file.tier import FileTier
from kvpool_server.tiers.registry import parse
from kvpool_server.tiers.tier import Tier, TierContext
from tests.contracts.tier_contract import Memory, TierContract, awaited, blocks_of, namespace_of, opened
from tests.support.file_tier import file_tier
from tests.support.tier_directories import open_directory
from tests.support.values import block_hash

NAMESPACE = namespace_of(TierContract.spec)
FOREIGN_UID = 12_345
SECRET = b"of another user" * 4096
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes the owners of files")


def _tier(root: Path, name: str = "one", owners: Sequence[int] = ()) -> FileTier:
    return file_tier(root, name, create=True, owners=tuple(owners))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tier's path with the directory of a peer "two", which holds the block "a"."""
    path = tmp_path / "tier"
    _store(path, "two")
    return path


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of another user that the server can read and write, and that nobody may change."""
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    return path


@awaited
async def _store(root: Path, name: str) -> None:
    async with opened(_tier(root, name)) as tier:
        assert await tier.write(NAMESPACE.groups[0], blocks_of("a")) == 1


@awaited
async def _open(tier: Tier) -> None:
    async with opened(tier):
        pass


@awaited
async def _reads(root: Path, name: str = "one", owners: Sequence[int] = ()) -> bool:
    """Whether a server gets the block "a" from what lies below the path."""
    async with opened(_tier(root, name, owners)) as tier:
        await tier.refresh()
        (sums,) = await tier.read(NAMESPACE.groups[0], [block_hash("a")], Memory(1).views)
    return sums is not None


# What lies at foreseeable names


def _device(place: Path, secret: Path) -> None:
    try:
        os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: endless.
    except PermissionError:
        pytest.skip("may not make devices")


TRAPS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda place, secret: place.symlink_to(secret),
    "hard link": lambda place, secret: place.hardlink_to(secret),
    "pipe": lambda place, secret: os.mkfifo(place),
    "directory": lambda place, secret: place.mkdir(),
    "socket": lambda place, secret: os.mknod(place, stat.S_IFSOCK | 0o600),
    "device": _device,
    "writable": lambda place, secret: (place.touch(), place.chmod(0o666)),
}
FILES = ["lock", "journal", "extent-00000"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_in_the_servers_directory_is_refused_and_nothing_behind_it_changes(
    tmp_path: Path, secret: Path, trap: str, name: str
) -> None:
    _store(tmp_path / "tier", "one")
    before = secret.stat()
    place = tmp_path / "tier" / "one" / name
    place.unlink()
    TRAPS[trap](place, secret)
    with pytest.raises(ConfigError, match=f"tier/one/{name} (is no plain file|has 2 names|can be written by others)"):
        _open(_tier(tmp_path / "tier"))
    assert secret.read_bytes() == SECRET and secret.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("name", ["journal", "extent-00000"])
@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_in_a_peers_directory_is_a_miss(root: Path, secret: Path, trap: str, name: str) -> None:
    place = root / "two" / name
    if trap in ("link", "hard link"):  # Even what the right bytes lie in.
        place.replace(secret)
    else:
        place.unlink()
    TRAPS[trap](place, secret)
    assert not _reads(root)


@pytest.mark.parametrize("trap", ["link", "hard link", "pipe"])
def test_what_lies_where_a_journal_is_compacted_is_removed_and_not_written(
    tmp_path: Path, secret: Path, trap: str
) -> None:
    one = tmp_path / "tier" / "one"
    one.mkdir(mode=0o700, parents=True)
    TRAPS[trap](one / "journal.new", secret)
    _open(_tier(tmp_path / "tier"))
    assert secret.read_bytes() == SECRET and not (one / "journal.new").exists()
    assert (one / "journal").stat().st_nlink == 1 and not (one / "journal").is_symlink()


def test_extents_beyond_the_tiers_size_are_removed_only_if_they_are_plain_files(tmp_path: Path, secret: Path) -> None:
    one = tmp_path / "tier" / "one"
    one.mkdir(mode=0o700, parents=True)
    (one / "extent-90000").symlink_to(secret)
    with pytest.raises(ConfigError, match="extent-90000 is no plain file"):
        _open(_tier(tmp_path / "tier"))
    assert (one / "extent-90000").is_symlink()


def test_a_link_instead_of_a_directory_is_not_followed(root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    (root / "two").rename(elsewhere)
    (root / "two").symlink_to(elsewhere)
    assert not _reads(root)
    before = sorted(elsewhere.iterdir())
    with pytest.raises(ConfigError, match="two is no directory, or a symbolic link"):
        _open(_tier(root, "two"))
    assert sorted(elsewhere.iterdir()) == before


# Owners and permissions


@needs_root
@pytest.mark.parametrize("place", ["", "two", "two/lock", "two/journal", "two/extent-00000"])
def test_what_belongs_to_a_foreign_user_is_used_only_where_that_user_is_trusted(root: Path, place: str) -> None:
    os.chown(root / place, FOREIGN_UID, FOREIGN_UID)
    if place not in ("", "two/lock"):  # A peer's.
        with capture_logs() as logs:
            assert not _reads(root)
        if not place.endswith("extent-00000"):
            (said,) = [line for line in logs if line["event"] == "a peer's directory cannot be read"]
            assert f"belongs to uid {FOREIGN_UID}" in said["error"] and f"owners={FOREIGN_UID}" in said["error"]
        assert _reads(root, owners=[FOREIGN_UID])
    with pytest.raises(ConfigError, match=rf"belongs to uid {FOREIGN_UID}.*it trusts 0\).*owners={FOREIGN_UID}"):
        _open(_tier(root, "two"))
    _open(_tier(root, "two", owners=[FOREIGN_UID]))


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o720, 0o702])
@pytest.mark.parametrize("place", ["", "two"])
def test_nothing_is_read_or_started_where_others_can_write(root: Path, place: str, mode: int) -> None:
    (root / place).chmod(mode)
    if place:
        assert not _reads(root)
    with pytest.raises(ConfigError, match=rf"can be written by others \(mode {mode:04o}\); chmod go-w it"):
        _open(_tier(root, "two"))


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_what_the_server_makes_is_its_own_alone_unless_an_operator_lets_a_group_read_its_directory(
    tmp_path: Path, umask: int
) -> None:
    shared = tmp_path / "shared" / "one"
    shared.mkdir(0o700, parents=True)
    shared.parent.chmod(0o700)
    shared.chmod(0o2750)
    before = os.umask(umask)
    try:
        _store(tmp_path / "above" / "tier", "one")
        _store(shared.parent, "one")
    finally:
        os.umask(before)
    made = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "above").rglob("*")}
    assert made == {"tier": 0o700, "one": 0o700, "lock": 0o600, "journal": 0o600, "extent-00000": 0o600}
    assert stat.S_IMODE((tmp_path / "above").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in shared.iterdir()} == {0o640}


# Names


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/nowhere/else", "../two"])
def test_only_an_entry_of_the_directory_can_be_named(tmp_path: Path, name: str) -> None:
    directory = open_directory(tmp_path)
    for use in (
        lambda: directory.open(name, os.O_RDONLY),
        lambda: directory.open_directory(name, create=True),
        lambda: directory.rename(name, "b"),
        lambda: directory.rename("a", name),
        lambda: directory.unlink(name),
        lambda: directory.rmdir(name),
        lambda: directory.stat(name),
    ):
        with pytest.raises(UntrustedFileError, match="is no entry of"):
            use()
    directory.close()


@pytest.mark.parametrize("host", ["../../nowhere", ".removed-host", "a b\n", "höst"])
def test_a_hosts_name_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    options = parse(f"file:{tmp_path / 'tier'},size=8MiB,create=yes,io=buffered")
    _open(options.make(TierContext(("127.0.0.1", 50051), PrefixLRU)))
    (made,) = (tmp_path / "tier").iterdir()
    assert made.name.endswith("-50051") and made.name.isascii() and made.name.replace("-", "_").isprintable()
    assert not made.name.startswith(".") and " " not in made.name


# The event loop, and descriptors


def test_directories_are_read_on_a_thread_of_their_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    for place, name in ((PeerDirectories, "refresh"), (DirectoryLock, "send_heartbeat"), (os, "scandir")):
        really = getattr(place, name)

        def noted(*arguments: object, _really: Callable[..., object] = really) -> object:
            threads.add(threading.current_thread().name)
            return _really(*arguments)

        monkeypatch.setattr(place, name, noted)
    assert _reads(root)
    assert threads and all(name.startswith("kvpool-tier") for name in threads)


def test_a_closed_directory_opens_nothing_in_whatever_has_its_number_now(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    old = Directory.open_root(tmp_path / "a", None)
    old.close()
    new = Directory.open_root(tmp_path / "b", None)
    with pytest.raises(FileNotFoundError, match="this directory is closed"):
        old.open("file", os.O_RDONLY)
    old.close()
    os.close(new.open("file", os.O_RDONLY))
    new.close()


def test_a_tier_reads_an_honest_peer_and_leaves_no_descriptor_open(root: Path) -> None:
    assert _reads(root)
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [link for link in links if link.startswith(str(root))]


@awaited
async def test_a_peers_directory_that_is_replaced_is_read_anew(root: Path) -> None:
    async with opened(_tier(root)) as tier:
        await tier.refresh()
        assert tier.known(NAMESPACE.groups[0], [block_hash("a")]) == [True]
        (root / "two").rename(root / ".removed-two")
        await tier.refresh()
        assert tier.known(NAMESPACE.groups[0], [block_hash("a")]) == [False]
        await asyncio.to_thread((root / ".removed-two").rename, root / "two")
        await tier.refresh()
        assert tier.known(NAMESPACE.groups[0], [block_hash("a")]) == [True]


@awaited
async def test_a_link_that_is_planted_while_the_server_runs_is_not_followed(root: Path, secret: Path) -> None:
    """The server has the journal open; only an extent is opened later."""
    async with opened(_tier(root)) as tier:
        (root / "one" / "extent-00000").symlink_to(secret)
        with pytest.raises(Exception, match="extent-00000 is no plain file"):
            await tier.write(NAMESPACE.groups[0], blocks_of("b"))
    assert secret.read_bytes() == SECRET


def test_a_directory_is_closed_by_its_last_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that hangs in a file system keeps the descriptor, and nobody waits for the call."""
    (tmp_path / "file").touch()
    directory = open_directory(tmp_path)
    hangs, goes_on = threading.Event(), threading.Event()
    really = os.open

    def slow(*arguments: object, **options: object) -> int:
        hangs.set()
        assert goes_on.wait(10)
        return really(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", slow)
    opened: list[int] = []
    thread = threading.Thread(target=lambda: opened.append(directory.open("file", os.O_RDONLY)))
    thread.start()
    assert hangs.wait(10)
    directory.close()
    goes_on.set()
    thread.join(10)
    assert os.fstat(opened[0]).st_ino == (tmp_path / "file").stat().st_ino
    os.close(opened[0])
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert str(tmp_path) not in links
