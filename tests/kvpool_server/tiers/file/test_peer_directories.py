"""Servers on one path: one reads what the others wrote, and survives whatever lies there."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvpool_server.tiers.file.peer_directories import PeerDirectories
from kvpool_server.tiers.file.tier import FileTier
from kvpool_server.tiers.tier import TierError
from tests.contracts.tier_contract import TierContract, awaited, blocks_of, namespace_of, opened, read_back
from tests.support.file_tier import BadDisk, file_tier
from tests.support.tier_directories import acquire
from tests.support.values import block_hash

NAMESPACE = namespace_of(TierContract.spec)


def _known(tier: FileTier, *names: str) -> list[bool]:
    return tier.known(NAMESPACE.groups[0], [block_hash(name) for name in names])


@awaited
async def test_a_server_whose_directory_has_gone_does_not_pretend(tmp_path: Path) -> None:
    async with opened(file_tier(tmp_path)) as tier:
        await tier.write(NAMESPACE.groups[0], blocks_of("a"))
        (tmp_path / "one").rename(tmp_path / ".gone")
        with capture_logs() as logs:
            for _ in range(3):
                await tier.refresh()
        assert [line["event"] for line in logs] == ["a tier's directory was removed or replaced"]
        assert _known(tier, "a") == [False]
        with pytest.raises(TierError, match="was removed or replaced"):
            await tier.write(NAMESPACE.groups[0], blocks_of("b"))
        with pytest.raises(TierError, match="was removed or replaced"):
            await read_back(tier, NAMESPACE, "a")
        acquire(tmp_path / "one").close()
        await tier.refresh()
        assert _known(tier, "a") == [False], "the directory at the path is another one"
        shutil.rmtree(tmp_path / "one")
        (tmp_path / ".gone").rename(tmp_path / "one")
        await tier.refresh()
        assert await read_back(tier, NAMESPACE, "a") == ["a"]


@awaited
async def test_a_neighbours_read_error_is_a_miss_and_the_block_is_not_there_until_its_journal_says_so(
    tmp_path: Path,
) -> None:
    disk = BadDisk()
    two, one = file_tier(tmp_path, "two"), file_tier(tmp_path, disk=disk)
    async with opened(two):
        await two.write(NAMESPACE.groups[0], blocks_of("a", "b"))
        async with opened(one):
            await one.refresh()
            assert _known(one, "a", "b") == [True, True]
            disk.bad_slots = {0, 1}
            assert await read_back(one, NAMESPACE, "ab") == [None, None]
            disk.bad_slots = set()
            assert _known(one, "a", "b") == [False, False], "still believed"
            assert await one.write(NAMESPACE.groups[0], blocks_of("a")) == 1
            assert one.holdings(NAMESPACE.fingerprint).num_entries == 1
            await two.remove(NAMESPACE.groups[0], [block_hash("b")])
            await two.write(NAMESPACE.groups[0], blocks_of("b"))
            await one.refresh()
            assert _known(one, "b") == [True], "its owner has stored it anew"
            assert await read_back(one, NAMESPACE, "ab") == ["a", "b"]


@awaited
async def test_the_tier_refreshes_again_after_any_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_server.tiers.file.tier.REFRESH_S", 0.001)
    looks: list[int] = []

    def fails(peers: PeerDirectories) -> None:
        looks.append(1)
        raise RuntimeError("unexpected")

    monkeypatch.setattr(PeerDirectories, "refresh", fails)
    tier = file_tier(tmp_path)
    with capture_logs() as logs:
        async with opened(tier):
            while len(looks) < 5:
                await asyncio.sleep(0.001)
    assert len([line for line in logs if line["log_level"] == "warning"]) == 1


@awaited
async def test_a_server_starts_before_it_has_read_what_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their journals may be large, and their file system may hang."""
    monkeypatch.setattr("kvpool_server.tiers.file.tier.CLOSE_S", 0.1)
    hangs = threading.Event()
    monkeypatch.setattr(PeerDirectories, "refresh", lambda peers: hangs.wait(30))
    tier = file_tier(tmp_path)
    async with asyncio.timeout(20):  # The refresh hangs for 30 s.
        async with opened(tier):
            assert await tier.write(NAMESPACE.groups[0], blocks_of("a")) == 1
    hangs.set()
