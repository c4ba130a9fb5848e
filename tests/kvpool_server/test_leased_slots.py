"""Loads whose lookup says where the blocks lie: no other call before the bytes, and never bytes of another block."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvpool.client.client import Client
from kvpool.client.handles import Namespace
from kvpool.protocol.errors import ChecksumError, InvalidRequestError, KVPoolError, LeaseExpiredError
from kvpool.protocol.types import LeasedSlots, Lookup, ShardRange
from kvpool.transport.base import Buffers
from tests.support.processes import ServerProcess
from tests.support.values import group_spec, namespace_spec, payload, run_of

StartServer = Callable[..., ServerProcess]
Connect = Callable[..., Client]
CHUNK = 512
SHARDS = 4
NAMES = ("a", "b", "c", "d", "e")
SPEC = namespace_spec(group_spec(chunk_bytes=CHUNK, num_shards=SHARDS), group_spec(chunk_bytes=CHUNK))


@pytest.fixture(params=["shm", "tcp", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Rig:
    """A server with blocks in it, and a client over one transport."""

    def __init__(self, server: ServerProcess, connect: Connect, transport: str, **config: int):
        self.server = server
        self.client = connect(server, transport=transport, **config)
        self.namespace = self.client.open_namespace(SPEC)
        self.store(*NAMES)
        self._before = dict(self.client.admin.stats().counters)

    def store(self, *names: str) -> None:
        run = run_of(*names)
        result = self.client.put_blocks(self.namespace, run, [payload(name, SHARDS * CHUNK) for name in names])
        assert result.receipt.num_complete == len(names)

    def lookup(self, *names: str, prefix_only: bool = True) -> Lookup:
        return self.client.lookup(self.namespace, [run_of(*names)], prefix_only=prefix_only, locate=True)

    def read(
        self,
        lease_id: int,
        leased: LeasedSlots | None,
        *names: str,
        shards: ShardRange | None = None,
        namespace: Namespace | None = None,
    ) -> list[bytes]:
        """The blocks' bytes, as far as `get` vouches for them; by default of the rig's namespace."""
        blocks = [b""] * len(names)

        def drain(indices: Sequence[int], buffers: Buffers) -> None:
            for idx, buffer in zip(indices, buffers, strict=True):
                blocks[idx] = bytes(buffer)

        located = self.client.get(
            namespace or self.namespace, lease_id, [run_of(*names)], drain, shards=shards, leased=leased
        )
        assert all(located.present)
        return blocks

    def counted(self, name: str) -> int:
        """How much a counter has grown."""
        return self.client.admin.stats().counters[name] - self._before.get(name, 0)


@pytest.fixture
def rig(shared_server: ServerProcess, connect: Connect, transport: str) -> Rig:
    return Rig(shared_server, connect, transport)


def test_a_load_asks_once_and_reads_what_was_stored(rig: Rig) -> None:
    found = rig.lookup(*NAMES, "gone")
    assert found.hits[0].num_leading == len(NAMES)
    leased = found.leased(0, 0, len(NAMES))
    assert rig.read(found.lease_id, leased, *NAMES) == [bytes(payload(name, SHARDS * CHUNK)) for name in NAMES]
    assert rig.counted("get_blocks") == 0
    assert rig.counted("located_blocks") == len(NAMES)


@pytest.mark.parametrize("shards", [ShardRange(0, 1), ShardRange(1, 2), ShardRange(3, 1)])
def test_a_rank_reads_its_shards(rig: Rig, shards: ShardRange) -> None:
    found = rig.lookup(*NAMES)
    mine = slice(shards.start * CHUNK, (shards.start + shards.count) * CHUNK)
    expected = [bytes(payload(name, SHARDS * CHUNK))[mine] for name in NAMES]
    assert rig.read(found.lease_id, found.leased(0, 0, len(NAMES)), *NAMES, shards=shards) == expected
    assert rig.counted("get_blocks") == 0


def test_a_part_of_a_run_with_gaps_is_read(rig: Rig) -> None:
    found = rig.lookup("a", "b", "gone", "c", "d", "e", prefix_only=False)
    assert found.leased(0, 1, 4) is None, "the answer does not say where a missing block lies"
    expected = [bytes(payload(name, SHARDS * CHUNK)) for name in ("d", "e")]
    assert rig.read(found.lease_id, found.leased(0, 4, 6), "d", "e") == expected
    assert rig.counted("get_blocks") == 0


def test_slots_of_another_namespace_are_not_read(rig: Rig) -> None:
    """As by a rank whose weights are not those that the scheduler looked up with."""
    other = rig.client.open_namespace(namespace_spec(*SPEC.groups, salt="another"))
    found = rig.lookup(*NAMES)
    with pytest.raises(InvalidRequestError, match="the leased slots are of namespace"):
        rig.read(found.lease_id, found.leased(0, 0, len(NAMES)), *NAMES, namespace=other)


def test_slots_of_other_blocks_than_those_to_read_are_refused(rig: Rig) -> None:
    found = rig.lookup(*NAMES)
    with pytest.raises(InvalidRequestError, match="2 leased slots for 3 blocks; give one a block"):
        rig.read(found.lease_id, found.leased(0, 0, 2), "a", "b", "c")


def test_lookups_that_do_not_ask_are_not_told(rig: Rig) -> None:
    run = run_of(*NAMES)
    assert rig.client.lookup(rig.namespace, [run]).leased(0, 0, 1) is None
    assert rig.client.lookup(rig.namespace, [run], lease=False, locate=True).leased(0, 0, 1) is None


def test_a_lease_that_expired_yields_nothing(shared_server: ServerProcess, connect: Connect, transport: str) -> None:
    rig = Rig(shared_server, connect, transport, lease_ttl_ms=100)
    found = rig.lookup(*NAMES)
    time.sleep(0.11)
    with pytest.raises(LeaseExpiredError):
        rig.read(found.lease_id, found.leased(0, 0, len(NAMES)), *NAMES)


def test_a_late_answer_counts_from_when_it_was_asked(rig: Rig) -> None:
    pending = rig.client.rpc.lookup_async(rig.namespace, [run_of(*NAMES)], locate=True)
    asked_by = time.monotonic()
    time.sleep(0.05)
    found = pending.result(10)
    assert found is not None and found.ends_at <= asked_by + found.lease_ttl_ms / 1000


def test_the_servers_own_clock_ends_a_permit(shared_server: ServerProcess, connect: Connect) -> None:
    rig = Rig(shared_server, connect, "tcp", lease_ttl_ms=100)
    found = rig.lookup(*NAMES)
    leased = found.leased(0, 0, len(NAMES))
    assert leased is not None
    time.sleep(0.11)
    with pytest.raises(KVPoolError, match="expired"):
        rig.read(found.lease_id, dataclasses.replace(leased, ends_at=time.monotonic() + 60), *NAMES)


def test_a_leased_block_that_was_removed_keeps_its_bytes_until_the_lease_ends(rig: Rig) -> None:
    found = rig.lookup(*NAMES)
    leased = found.leased(0, 0, len(NAMES))
    assert rig.client.admin.remove(rig.namespace, [run_of(*NAMES)]) == len(NAMES)
    for nth in range(64):
        rig.store(f"{nth}")  # They must not get the slots of the leased blocks.
    assert rig.read(found.lease_id, leased, *NAMES) == [bytes(payload(name, SHARDS * CHUNK)) for name in NAMES]
    rig.client.release([found.lease_id])
    assert rig.lookup(*NAMES).hits[0].num_leading == 0


def test_bytes_that_have_changed_since_the_lookup_are_refused_and_dropped(rig: Rig, connect: Connect) -> None:
    found = rig.lookup(*NAMES)
    leased = found.leased(0, 0, len(NAMES))
    assert leased is not None
    mapped = connect(rig.server, transport="shm").open_namespace(SPEC).transport.memory
    assert mapped is not None
    mapped[int(np.frombuffer(leased.slots.offsets, "<u8")[2])] ^= 1
    with pytest.raises(ChecksumError):
        rig.read(found.lease_id, leased, *NAMES)
    assert rig.lookup(*NAMES).hits[0].num_leading == 2, "the server has verified the block, and dropped it"
    with pytest.raises(ChecksumError):
        rig.read(found.lease_id, leased, *NAMES)


def test_slots_of_another_boot_are_not_read(pool_server: StartServer, connect: Connect, transport: str) -> None:
    rig = Rig(pool_server("--memory", "1MiB"), connect, transport)
    found = rig.lookup(*NAMES)
    leased = found.leased(0, 0, len(NAMES))
    rig.server.kill()
    pool_server("--listen", rig.server.endpoint, "--memory", "1MiB")
    deadline = time.monotonic() + 60
    while True:
        try:
            anew = rig.client.open_namespace(SPEC)
            break
        except KVPoolError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with pytest.raises(LeaseExpiredError, match="another boot"):
        rig.read(found.lease_id, leased, *NAMES, namespace=anew)
    if transport != "shm":  # In shared memory nobody writes to the memory of a server that has ended.
        with pytest.raises(KVPoolError):
            rig.read(found.lease_id, leased, *NAMES)
