"""Recordings: what is in them, who may read them, and that a replay of one hits as its server did."""

from __future__ import annotations

import gzip
import json
import os
import stat
import tracemalloc
from pathlib import Path

import pytest

from benchmarks.replay.pool import make_pool, put, replay
from benchmarks.replay.request import MAX_BLOCKS, num_blocks
from benchmarks.replay.trace import load
from kvpool.protocol.errors import ConfigError
from kvpool.protocol.types import BlockRun
from kvpool_server.value.recorder import Recorder
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.values import block_hash, run_of

MANY = 1 << 30
GZIP_END_BYTES = 16
"""More than the last block, checksum and size of a gzip member, which hold no line."""


def drive(pool: PoolAtOnce, fingerprint: bytes, clock: FakeClock, rounds: int) -> tuple[int, int]:
    """Conversations whose turns add blocks that only a later put stores; returns hits and blocks looked up."""
    hits = blocks = 0
    for nth in range(rounds):
        chat, turn = nth * 7 % 11, nth // 11
        names = [(chat, depth) for depth in range(4 + 3 * turn)]
        run = run_of(*names)
        found = pool.lookup(fingerprint, [run], prefix_only=True, lease_ttl_ms=1_000)
        leading = found.hits[0].num_leading
        hits, blocks = hits + leading, blocks + len(run)
        parent = run.block_hashes[leading - 1] if leading else b""
        if leading < len(run):
            put(pool, fingerprint, BlockRun(0, run.block_hashes[leading:], parent))
        put(pool, fingerprint, BlockRun(0, [block_hash((chat, len(names)))], run.block_hashes[-1]))  # Its output.
        pool.release([found.lease_id])
        clock.advance(0.5)
    return hits, blocks


def record(
    path: Path, rounds: int = 60, blocks: int = 64, policy: str = "lru", times: int = 1, most: int = MANY, **names: bool
) -> tuple[Recorder, bytes, tuple[int, int]]:
    """Records conversations of tenant acme; returns the namespace's fingerprint and what the last ones found, too."""
    clock = FakeClock()
    pool, fingerprint = make_pool(blocks, policy, clock, tenant="acme")
    recorder = Recorder(str(path), most, clock=clock, **names)
    pool.traffic.append(recorder.observe)
    for _ in range(times):
        found = drive(pool, fingerprint, clock, rounds)
    recorder.close()
    return recorder, fingerprint, found


@pytest.mark.parametrize("policy", ["density", "lru"])
def test_a_replay_hits_as_often_as_the_recorded_pool(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "recording"
    _, _, (hits, blocks) = record(path, policy=policy)
    requests = load(path)
    assert 0 < hits < blocks == num_blocks(requests)
    assert replay(requests, 64, policy) == hits
    namespace = json.loads(gzip.decompress(path.read_bytes()).splitlines()[1])
    assert (namespace["block_tokens"], namespace["block_bytes"]) == ([512], [2 << 20])
    assert sum(each.hits for each in requests if each.hits is not None) == hits


def test_a_recording_is_private_and_names_nothing_unless_asked_to(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    _, fingerprint, _ = record(path, 5)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = gzip.decompress(path.read_bytes()).decode()
    assert "acme" not in text and "replay" not in text and fingerprint.hex() not in text
    assert block_hash((0, 0)).hex()[:16] not in text
    keys = {key for line in text.splitlines() for key in json.loads(line)}
    assert keys == {"kvpool_recording", "started", "namespace", "block_tokens", "block_bytes", "ms", "group",
                    "lookup", "hits", "put", "parent"}  # fmt: skip
    record(named := tmp_path / "named", 1, with_names=True)
    assert b'"tenant":"acme"' in gzip.decompress(named.read_bytes())


def test_two_sections_share_no_ids(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    for _ in range(2):
        record(path, 3)
    requests = load(path)
    first, second = ({each for request in half for each in request.ids} for half in (requests[:9], requests[9:]))
    assert len(requests) == 18 and not first & second


def test_a_full_file_stops_the_recording_and_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    recorder, _, _ = record(path, blocks=512, times=40, most=2_000)
    assert path.stat().st_size == recorder.nbytes <= 2_000
    load(path)
    assert record(path, 2, blocks=512, most=recorder.nbytes)[0].num_dropped > 0


def test_what_a_killed_server_leaves_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path)
    whole, every = path.read_bytes(), load(path)
    for size in range(20, len(whole) - GZIP_END_BYTES, 97):
        path.write_bytes(whole[:size])
        assert (read := load(path)) == every[: len(read)] and len(read) < 180


@pytest.mark.parametrize(
    "lines",
    [
        [{"namespace": 0}],
        [{"kvpool_recording": 2}],
        [{"kvpool_recording": 1}, {"ms": 1, "namespace": 0, "group": 0, "lookup": "0", "hits": 0}],
        [{"kvpool_recording": 1}, {"ms": 1, "namespace": 0, "group": 0, "lookup": "00" * 8, "hits": 2}],
        [{"kvpool_recording": 1}, {"ms": -1, "namespace": 0, "group": 0, "put": "00" * 8}],
        [{"kvpool_recording": 1}, {"ms": 1, "namespace": 0, "group": 0, "lookup": "00" * 8, "hits": 0.5}],
        [{"kvpool_recording": 1}, {"ms": 1, "namespace": 0, "group": 0, "lookup": "-1" * 8, "hits": 0}],
        [{"kvpool_recording": 1}, {"ms": 1, "namespace": 0, "group": 0, "lookup": "  " * 8, "hits": 0}],
        [{"kvpool_recording": 1}, {"other": 1}],
        [[]],
    ],
)
def test_lines_that_are_none_of_a_recording_are_refused(tmp_path: Path, lines: list[object]) -> None:
    path = tmp_path / "recording"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    with pytest.raises(ValueError, match="is no line of a recording"):
        load(path)


def test_a_recording_that_would_take_all_memory_or_stack_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 MB of it may hold 1 GB."""
    path = tmp_path / "recording"
    head = b'{"kvpool_recording":1}\n'
    line = b'{"ms":0,"namespace":0,"group":0,"lookup":"%s","hits":0}\n' % (b"0123456789abcdef" * MAX_BLOCKS)
    with gzip.open(path, "wb", 1) as file:
        file.write(head)
        for _ in range(8):
            file.write(line)
    tracemalloc.start()
    try:
        assert num_blocks(load(path)) == 8 * MAX_BLOCKS
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_BLOCKS * 24 + (16 << 20)
    finally:
        tracemalloc.stop()
    monkeypatch.setattr("benchmarks.replay.request.MAX_IDS", 8 * MAX_BLOCKS - 1)
    with pytest.raises(ValueError, match=r"line 9 .*more than 524,287 ids"):
        load(path)
    monkeypatch.setattr("benchmarks.replay.recording.MAX_PLAIN_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="give its first lines"):
        load(path)
    path.write_bytes(gzip.compress(head + b"[" * 100_000 + b"\n"))
    with pytest.raises(ValueError, match="line 2 is no line of a recording"):
        load(path)


def test_a_file_that_others_may_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    path.touch(0o644)
    with pytest.raises(ConfigError, match="others may use the recording"):
        Recorder(str(path), MANY)
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path, tmp_path / "none" / "recording"):
        with pytest.raises(ConfigError, match="recording"):
            Recorder(str(place), MANY)
