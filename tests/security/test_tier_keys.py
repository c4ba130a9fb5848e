"""Tiers whose servers share a key: whoever writes to the disk or to the store, and lacks the key, is not believed."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.protocol.errors import ConfigError
from kvpool.protocol.hashing import checksum
from kvpool_server.cache.entry import Record
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.tiers.block_mac import TAG_BYTES, BlockMac, read_key
from kvpool_server.tiers.file import journal
from kvpool_server.tiers.file.extents import Disk
from kvpool_server.tiers.file.journal import Inventory
from kvpool_server.tiers.file.own_blocks import Journal
from kvpool_server.tiers.file.tier import FileTier
from kvpool_server.tiers.mooncake.store_process import encode_footer
from kvpool_server.tiers.mooncake.tier import MooncakeTier
from kvpool_server.tiers.mooncake.worker import StoreConfig
from kvpool_server.tiers.tier import BlockKey, Tier
from tests.contracts.tier_contract import (
    SHARDS,
    SLOT,
    PersistentTierContract,
    TierContract,
    awaited,
    blocks_of,
    namespace_of,
    opened,
    read_back,
)
from tests.support.file_tier import SIZE, file_tier
from tests.support.mooncake import Cluster
from tests.support.tier_directories import open_directory
from tests.support.values import block_hash, payload

KEY = bytes(range(32))
MAC = BlockMac(KEY)
FORGED = payload("forged", SLOT)
FORGED_SUMS = [checksum(part) for part in np.split(FORGED, SHARDS)]


def _tier(root: Path, name: str = "one", key: bytes = KEY) -> FileTier:
    path = root.with_name(f"{root.name}.{key[:4].hex()}.key")
    return file_tier(root, name, create=True, key_file=str(_key_file(path, key.hex())) if key else "")


@pytest.fixture
def namespace() -> PoolNamespace:
    return namespace_of(TierContract.spec)


async def _write(tier: Tier, namespace: PoolNamespace, *names: str) -> None:
    async with opened(tier):
        assert await tier.write(namespace.groups[0], blocks_of(*names)) == len(names)


async def _read(tier: Tier, namespace: PoolNamespace, *names: str) -> list[bool]:
    """Opens the tier; for each block whether it came, right."""
    async with opened(tier):
        if isinstance(tier, FileTier):
            await tier.refresh()
        return [name is not None for name in await read_back(tier, namespace, names)]


def _load(directory: Path) -> Inventory:
    return Journal(open_directory(directory), Disk(), functools.partial(Inventory, has_tags=True)).load()


# Tags


def test_a_tag_holds_for_its_block_its_bytes_and_its_key_alone() -> None:
    name: BlockKey = (b"f" * 32, 1, b"h" * 32)
    data = bytearray(b"bytes of a block" * 64)
    view = memoryview(data)
    tag = MAC.tag(name, view)
    assert len(tag) == TAG_BYTES and MAC.is_valid(name, view, tag)
    assert MAC.tag(name, view) != tag, "a nonce has repeated"
    for other in ((b"g" * 32, 1, b"h" * 32), (b"f" * 32, 2, b"h" * 32), (b"f" * 32, 1, b"i" * 32)):
        assert not MAC.is_valid(other, view, tag)
    assert not BlockMac(bytes(32)).is_valid(name, view, tag)
    assert not MAC.is_valid(name, view[:-1], tag) and not MAC.is_valid(name, memoryview(bytes(data) + b"\0"), tag)
    for wrong in (b"", tag[:-1], tag + b"\0", bytes(TAG_BYTES)):
        assert not MAC.is_valid(name, view, wrong)
    for at in range(TAG_BYTES):
        assert not MAC.is_valid(name, view, tag[:at] + bytes([tag[at] ^ 1]) + tag[at + 1 :])
    for at in range(0, len(data), 37):
        data[at] ^= 0x80
        assert not MAC.is_valid(name, view, tag)
        data[at] ^= 0x80
    assert MAC.is_valid(name, view, tag)


# Key files


def _key_file(path: Path, text: str = KEY.hex(), mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("mode", "uid", "may"),
    [
        (0o600, 10_001, True), (0o640, 10_001, False), (0o604, 10_001, False), (0o610, 10_001, False),
        (0o440, 0, True), (0o640, 0, True), (0o444, 0, False), (0o460, 0, False),
    ],
)  # fmt: skip
def test_a_key_is_read_from_a_file_of_its_owner_which_if_it_is_roots_a_group_may_read(
    tmp_path: Path, mode: int, uid: int, may: bool
) -> None:
    """Of root's, as in the volume of a Kubernetes Secret whose pod has an fsGroup."""
    path = _key_file(tmp_path / "key", KEY.hex() + "\n", mode)
    if os.geteuid() == 0:
        os.chown(path, uid, -1)
    elif uid == 0:
        pytest.skip("only root can make a file of root's")
    if not may:
        with pytest.raises(ConfigError, match=rf"others can read the key .* \(mode {mode:04o}\); give it mode 0600"):
            read_key(path)
        return
    name: BlockKey = (bytes(32), 0, bytes(32))
    assert BlockMac(read_key(path)).is_valid(name, memoryview(b"a"), MAC.tag(name, memoryview(b"a")))


@pytest.mark.parametrize("text", ["", KEY.hex()[:-2], KEY.hex() + "00", "secret" * 10, "\xff" * 64])
def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = _key_file(tmp_path / "key", text)
    with pytest.raises(ConfigError, match="is no key; write one with: openssl rand -hex 32") as caught:
        read_key(path)
    assert not text or text not in str(caught.value)


def test_a_key_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing: No such file or directory; give a file as key_file"):
        read_key(tmp_path / "missing")


# The file tier


class TestKeyedFileTier(PersistentTierContract):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Callable[[], Tier]:
        return lambda: _tier(tmp_path / "tier")


def _write_journal(root: Path, inventory: Inventory) -> None:
    (root / "one" / "journal").write_bytes(b"".join(inventory.encode()))


@pytest.mark.parametrize("reader", ["one", "two"])
@awaited
async def test_forged_bytes_with_the_right_checksums_are_a_miss(
    tmp_path: Path, namespace: PoolNamespace, reader: str
) -> None:
    """The journal and the bytes are the intruder's; only the tags are not."""
    await _write(_tier(tmp_path), namespace, "a", "b")
    inventory = _load(tmp_path / "one")
    records = inventory.groups[namespace.fingerprint, 0]
    old = records[block_hash("a")]
    records[block_hash("a")] = Record(old.block_hash, old.parent_hash, old.offset, FORGED_SUMS, old.tag)
    _write_journal(tmp_path, inventory)
    with (tmp_path / "one" / "extent-00000").open("r+b") as extent:
        extent.seek(old.offset)
        extent.write(FORGED.tobytes())
    tier = _tier(tmp_path, reader)
    assert await _read(tier, namespace, "a", "b") == [False, True]
    assert tier.counters["corrupt_blocks"] == (1 if reader == "one" else 0)


@pytest.mark.parametrize("other_tenant", ["", "umbra"])
@awaited
async def test_a_blocks_own_bytes_and_tag_are_a_miss_in_the_place_of_another_block_or_tenant(
    tmp_path: Path, namespace: PoolNamespace, other_tenant: str
) -> None:
    """The fingerprint covers the tenant, and the tag the fingerprint: not even equal bytes of an equal prompt pass."""
    places = [(namespace, "a"), (namespace, "b")]
    if other_tenant:
        places[1] = (namespace_of(dataclasses.replace(namespace.spec, tenant=other_tenant)), "a")
    for place in places:
        await _write(_tier(tmp_path), *place)
    assert [await _read(_tier(tmp_path, "two"), *place) for place in places] == [[True], [True]]
    inventory = _load(tmp_path / "one")
    mine, theirs = ((inventory.groups[space.fingerprint, 0], block_hash(name)) for space, name in places)
    for (records, name), other in ((mine, theirs[0][theirs[1]]), (theirs, mine[0][mine[1]])):
        records[name] = Record(name, b"", other.offset, other.checksums, other.tag)
    _write_journal(tmp_path, inventory)
    for reader in ("two", "one"):
        assert [await _read(_tier(tmp_path, reader), *place) for place in places] == [[False], [False]]


@pytest.mark.parametrize("writes_with", [b"", bytes(32)])
@awaited
async def test_what_a_server_without_the_key_writes_is_not_read(
    tmp_path: Path, namespace: PoolNamespace, writes_with: bytes
) -> None:
    await _write(_tier(tmp_path, "one", writes_with), namespace, "a")
    for reader in ("two", "one"):
        assert await _read(_tier(tmp_path, reader), namespace, "a") == [False]
    await _write(_tier(tmp_path), namespace, "b")
    assert await _read(_tier(tmp_path), namespace, "b") == [True]


@awaited
async def test_tags_outlive_compaction_and_evictions(
    tmp_path: Path, namespace: PoolNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_server.tiers.file.own_blocks.COMPACT_AT_LEAST_BYTES", 4096)
    monkeypatch.setattr(journal, "RECORDS_A_FRAME", 16)
    async with opened(_tier(tmp_path)) as tier:
        for start in range(0, 2 * SIZE // SLOT, 128):
            await tier.write(namespace.groups[0], blocks_of(*(str(nth) for nth in range(start, start + 128))))
        names = [str(nth) for nth in range(2 * SIZE // SLOT)]
        kept = [name for name in names if tier.known(namespace.groups[0], [block_hash(name)]) == [True]]
    assert len(kept) == SIZE // SLOT
    for reader in ("two", "one"):
        assert all(await _read(_tier(tmp_path, reader), namespace, *kept[-200:]))


# Mooncake


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(64 << 20)
    yield made
    made.stop()


def _mooncake(cluster: Cluster) -> MooncakeTier:
    return MooncakeTier(StoreConfig(cluster.address, "P2PHANDSHAKE", "127.0.0.1", 0, "tcp", ""), mac=MAC)


class TestKeyedMooncakeTier(PersistentTierContract):
    @pytest.fixture
    def make_tier(self, cluster: Cluster) -> Callable[[], Tier]:
        return lambda: _mooncake(cluster)

    @pytest.mark.parametrize("tag", ["none", "zeros", "another block's", "another tenant's"])
    @awaited
    async def test_a_forged_object_with_the_right_checksums_is_a_miss(
        self, cluster: Cluster, namespace: PoolNamespace, tag: str
    ) -> None:
        key = f"kvpool/{namespace.fingerprint.hex()}/0/{block_hash('a').hex()}"
        other = dataclasses.replace(namespace.spec, tenant="umbra")
        tags = {
            "none": b"",
            "zeros": bytes(TAG_BYTES),
            "another block's": MAC.tag((namespace.fingerprint, 0, block_hash("b")), FORGED.data),
            "another tenant's": MAC.tag((other.fingerprint(), 0, block_hash("a")), FORGED.data),
        }
        forged = FORGED.tobytes() + encode_footer(key, SLOT, FORGED_SUMS, tags[tag])
        async with opened(_mooncake(cluster)) as tier:
            channel = tier.store.start().transfers.get()
            channel.memory[: len(forged)] = np.frombuffer(forged, np.uint8)
            assert channel.call("put", [key], len(forged)) == [0]
            tier.store.start().transfers.put(channel)
            assert await read_back(tier, namespace, ["a"]) == [None]
            assert tier.stats().counters["corrupt_blocks"] == 1
