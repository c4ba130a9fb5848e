import dataclasses
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import ConfigError, TransferError
from kvpool.segment import IDLE_NICE, MAP_AHEAD, PREFIX, Segment, mount_of, sweep
from tests.support.processes import wait_for

NBYTES = 1 << 20


@pytest.fixture
def directory(ram_dir: Path) -> str:
    return str(ram_dir)


@pytest.fixture
def segment(directory: str) -> Iterator[Segment]:
    made = Segment.create(directory, NBYTES)
    yield made
    made.close()


def test_both_sides_see_the_same_bytes(segment: Segment) -> None:
    attached = Segment.attach(segment.info())
    assert attached.bytes.shape == segment.bytes.shape == (NBYTES,) and attached.bytes.dtype == np.uint8
    segment.bytes[123] = 7
    attached.bytes[NBYTES - 1] = 9
    assert attached.bytes[123] == 7 and segment.bytes[NBYTES - 1] == 9
    attached.close()


def test_the_nonce_lies_where_the_info_says_and_outside_the_arena(segment: Segment) -> None:
    info = segment.info()
    stored = Path(info.path).read_bytes()[info.nonce_offset : info.nonce_offset + len(info.nonce)]
    assert stored == info.nonce != bytes(len(info.nonce))
    segment.bytes[:] = 0xFF
    assert Segment.attach(info).nonce == info.nonce


def test_only_the_owner_can_read_the_file(segment: Segment) -> None:
    assert Path(segment.path).stat().st_mode & 0o777 == 0o600


def test_another_nonce_is_another_servers_memory(segment: Segment) -> None:
    other = dataclasses.replace(segment.info(), nonce=bytes(16))
    with pytest.raises(TransferError, match=f"{segment.path} is another server's"):
        Segment.attach(other)


@pytest.mark.parametrize("nbytes", [NBYTES - 1, 2 * NBYTES])
def test_another_size_is_refused_before_it_is_mapped(segment: Segment, nbytes: int) -> None:
    with pytest.raises(TransferError, match=f"{segment.path} has another size"):
        Segment.attach(dataclasses.replace(segment.info(), nbytes=nbytes))


def test_a_path_that_is_not_here_is_named(segment: Segment) -> None:
    with pytest.raises(TransferError, match="no shared memory at /no/such/file: No such file"):
        Segment.attach(dataclasses.replace(segment.info(), path="/no/such/file"))


def test_failed_attaches_leave_no_file_descriptor(segment: Segment) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for bad in ({"nonce": bytes(16)}, {"nbytes": 5}, {"path": "/no/such/file"}):
        with pytest.raises(TransferError):
            Segment.attach(dataclasses.replace(segment.info(), **bad))
    assert len(os.listdir("/proc/self/fd")) == before


def test_close_removes_the_owners_file_and_is_idempotent(directory: str) -> None:
    segment = Segment.create(directory, NBYTES)
    attached = Segment.attach(segment.info())
    attached.close()
    attached.close()
    assert os.listdir(directory) == [os.path.basename(segment.path)], "only its owner removes a segment"
    segment.close()
    segment.close()
    assert os.listdir(directory) == []
    assert len(segment.bytes) == 0


def test_a_view_outlives_close(directory: str) -> None:
    segment = Segment.create(directory, NBYTES)
    view = segment.bytes[10:20]
    view[:] = 3
    segment.close()
    assert view.tolist() == [3] * 10


def test_more_than_the_directory_holds_is_refused_before_anything_is_made(directory: str) -> None:
    with pytest.raises(ConfigError, match=rf"{directory} has \d+ bytes free, and the arena needs {1 << 60}; lower"):
        Segment.create(directory, 1 << 60)
    assert os.listdir(directory) == []


def test_a_directory_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot make shared memory in '/no/such/dir'.*--shm-dir"):
        Segment.create("/no/such/dir", NBYTES)


def test_a_directory_that_is_not_in_memory_is_refused_with_its_file_system() -> None:
    with pytest.raises(
        ConfigError, match=r"/proc/self is on a file system of type proc .*tmpfs, such as /dev/shm"
    ) as it:
        Segment.create("/proc/self", NBYTES)
    assert "see --shm-dir" in str(it.value)


MOUNTS = """\
22 28 0:21 / / rw - ext4 /dev/vda rw
23 22 0:22 / /data rw shared:1 master:2 - ext4 /dev/vdb rw
24 23 0:23 / /data/ram\\040disk rw,nosuid - tmpfs tmpfs rw
25 22 0:24 / /over rw - tmpfs tmpfs rw
26 25 0:25 / /over rw - xfs /dev/vdc rw
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/", ("ext4", "/")),
        ("/database", ("ext4", "/")),
        ("/data/x", ("ext4", "/data")),
        ("/data/ram disk", ("tmpfs", "/data/ram disk")),
        ("/data/ram disk/a/b", ("tmpfs", "/data/ram disk")),
        ("/over/a", ("xfs", "/over")),
    ],
)
def test_the_mount_of_a_path_is_the_last_of_the_longest(path: str, mount: tuple[str, str]) -> None:
    assert mount_of(path, MOUNTS) == mount


def test_populate_backs_the_part_with_memory() -> None:
    segment = Segment.create("/dev/shm", 4 * NBYTES)
    try:
        assert Path(segment.path).stat().st_blocks * 512 <= NBYTES
        segment.populate(0, 4 * NBYTES)
        assert Path(segment.path).stat().st_blocks * 512 >= 4 * NBYTES
    finally:
        segment.close()


def _mapped_bytes(path: str) -> int:
    """Bytes of `path` that this process has in its page tables, over all mappings."""
    mapped, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(path)
        elif ours and line.startswith("Rss:"):
            mapped += int(line.split()[1]) << 10
    return mapped


def test_map_ahead_maps_what_the_owner_has_backed_and_backs_nothing_itself() -> None:
    owner = Segment.create("/dev/shm", 4 * NBYTES)
    attached = Segment.attach(owner.info())
    try:
        attached.map_ahead()
        assert _mapped_bytes(owner.path) <= NBYTES
        owner.populate(0, 4 * NBYTES)
        wait_for(lambda: _mapped_bytes(owner.path) >= 8 * NBYTES, "both mappings in the page tables")
    finally:
        attached.close()
        owner.close()


def test_mapping_ahead_gives_way_to_every_other_thread() -> None:
    owner = Segment.create("/dev/shm", 4 * NBYTES)
    attached = Segment.attach(owner.info())
    try:
        attached.map_ahead()  # Waits for the owner to back the first step.
        mapper = next(thread for thread in threading.enumerate() if thread.name == MAP_AHEAD)
        wait_for(lambda: os.getpriority(os.PRIO_PROCESS, mapper.native_id or 0) == IDLE_NICE, "a mapper that gives way")
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < IDLE_NICE
    finally:
        attached.close()
        owner.close()


def _own_a_segment(directory: str, report: Connection) -> None:
    report.send(Segment.create(directory, NBYTES).path)
    signal.pause()


def test_sweep_removes_what_a_dead_owner_left_and_nothing_else(segment: Segment, directory: str) -> None:
    stranger = Path(directory) / "notes.txt"
    stranger.write_text("mine")
    here, there = multiprocessing.get_context("spawn").Pipe()
    owner = multiprocessing.get_context("spawn").Process(target=_own_a_segment, args=(directory, there))
    owner.start()
    assert here.poll(20), "the owner did not start"
    path = here.recv()
    assert os.path.basename(path).startswith(f"{PREFIX}{owner.pid}-")

    assert sweep(directory) == [], "both owners live"
    owner.kill()
    owner.join(10)
    assert sweep(directory) == [path]
    assert sorted(os.listdir(directory)) == sorted([os.path.basename(segment.path), "notes.txt"])
    assert sweep(directory) == []
