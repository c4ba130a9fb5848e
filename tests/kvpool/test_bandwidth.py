from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.commands.server import measurement_text
from kvpool.protocol.errors import KVPoolError, OutOfSpaceError
from kvpool.protocol.namespace import MEASUREMENT_MODEL, GroupSpec, NamespaceSpec
from kvpool.protocol.types import BlockRun
from kvpool.protocol.wire import encode_spec
from kvpool.report.bandwidth import (
    BLOCK,
    HIT_TOKENS,
    LEAST_BYTES,
    NUM_ROUNDS,
    ROUNDS_S,
    free_bytes,
    hit_bytes,
    hit_cost,
    measure,
    shards_of_rank,
    usual_block,
)
from kvpool.v1 import pool_pb2 as pb
from tests.conftest import Connect, StartServer
from tests.support.clock import FakeClock
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import block_hash, group_spec, namespace_spec, payload

MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server on which no lease of another test ends while one counts them."""
    server = ServerProcess(tmp_path_factory.mktemp("bandwidth"), "--memory", "64MiB")
    yield server
    server.stop()


def left_over(client: Client) -> list[int]:
    """Blocks of each of the measurement's namespaces."""
    return [info.num_entries for info in client.admin.namespaces() if info.spec.model == MEASUREMENT_MODEL]


def store(client: Client, spec: NamespaceSpec, count: int) -> BlockRun:
    namespace = client.open_namespace(spec)
    run = BlockRun(0, [block_hash(nth) for nth in range(count)])
    block = payload("all", spec.groups[0].slot_bytes)
    client.put_blocks(namespace, run, [block] * count)
    return run


def prefaulted(server: ServerProcess, connect: Connect) -> Client:
    """A client of a server all of whose memory can be used."""
    client = connect(server)

    def is_backed() -> bool:
        stats = client.admin.stats()
        return stats.prefaulted_bytes >= stats.arena_bytes

    wait_for(is_backed, "the arena's memory")
    return client


def sizes(found: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of a rank's part of a block, and of each round's puts and gets."""
    return found["region_bytes"], found["put_round_bytes"], found["get_round_bytes"]


def num_present(client: Client, spec: NamespaceSpec, run: BlockRun) -> int:
    found = client.lookup(client.open_namespace(spec), [run], prefix_only=False, lease=False)
    return found.hits[0].complete.bit_count()


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_measurement_moves_bytes_and_leaves_none(server: ServerProcess, connect: Connect, transport: str) -> None:
    client = connect(server, transport=transport)
    before = client.admin.stats()
    found = measure(client, 8 * MIB)
    assert (found["transport"], *sizes(found)) == (transport, 2 * MIB, 8 * MIB, 8 * MIB)
    assert (found["rounds"], found["limited_by"], found["evicted_blocks"]) == (NUM_ROUNDS, "", 0)
    for name in ("put_gb_per_s", "get_gb_per_s"):
        assert 0 < found[name]["lowest"] <= found[name]["median"] <= found[name]["highest"]
    assert found["one_block_ms"] > 0 and found["round_trip_ms"] > 0
    after = client.admin.stats()
    moved = {name: after.counters[name] - before.counters[name] for name in ("put_completed_blocks", "removed_blocks")}
    assert set(left_over(client)) == {0} and moved["put_completed_blocks"] == moved["removed_blocks"] >= NUM_ROUNDS * 4
    assert (after.free_bytes, after.num_leases) == (before.free_bytes, before.num_leases)


def test_a_rank_reads_its_shards_of_whole_blocks_and_a_slow_pool_is_measured_in_few_rounds(
    pool_server: StartServer, connect: Connect
) -> None:
    client = connect(pool_server("--memory", "64MiB", "--grace-ms", "100"), transport="shm")
    assert usual_block(client) == BLOCK
    block = group_spec(chunk_bytes=1_000, num_shards=8)
    found = measure(client, 16 * block.slot_bytes, block, shards_of_rank(block, 4))
    assert sizes(found) == (2_000, 16 * 8_000, 16 * 2_000)
    assert usual_block(client) == BLOCK, "the measurement's own namespace does not count"
    clock = FakeClock()

    def slow() -> float:
        clock.advance(ROUNDS_S / 8)
        return clock()

    found = measure(client, 32 * MIB, clock=slow)
    assert found["limited_by"] == "time" and found["put_round_bytes"] < 32 * MIB
    assert 1 <= found["rounds"] < NUM_ROUNDS


def test_a_full_pool_gives_up_few_blocks_and_of_the_measured_size_alone(
    pool_server: StartServer, connect: Connect
) -> None:
    client = prefaulted(pool_server("--memory", "128MiB"), connect)
    small, large = (namespace_spec(group_spec(chunk_bytes=size)) for size in (MIB, 4 * MIB))
    first = store(client, small, 64)
    found = measure(client, 256 * MIB, small.groups[0])
    assert found["limited_by"] == "room" and found["put_round_bytes"] <= found["free_bytes"] // 2
    assert found["evicted_blocks"] == 0 and num_present(client, small, first) == 64
    last = store(client, large, 16)
    assert free_bytes(client.admin.stats()) == 0
    block = usual_block(client)
    assert block == large.groups[0]
    found = measure(client, 256 * MIB, block)
    assert (found["limited_by"], found["put_round_bytes"]) == ("room", LEAST_BYTES)
    assert num_present(client, small, first) == 64
    assert found["evicted_blocks"] == 16 - num_present(client, large, last) == LEAST_BYTES // (4 * MIB)


class FailingClient(Client):
    """Raises in the course of the nth get, with its bytes on their way."""

    def __init__(self, config: ClientConfig, error: BaseException, nth: int):
        super().__init__(config)
        self._error, self._nth = error, nth

    def get(self, namespace: Any, lease_id: int, runs: Any, drain: Any, **options: Any) -> Any:
        self._nth -= 1

        def failing(indices: Any, buffers: Any) -> Any:
            raise self._error

        return super().get(namespace, lease_id, runs, failing if self._nth == 0 else drain, **options)


@pytest.mark.parametrize("nth", [1, 6])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), KVPoolError("broken")])
def test_an_interrupted_measurement_leaves_no_block(server: ServerProcess, nth: int, error: BaseException) -> None:
    config = ClientConfig(endpoint=server.endpoint, timeout_ms=10_000)
    with FailingClient(config, error, nth) as client:
        num_leases = client.admin.stats().num_leases
        with pytest.raises(type(error)):
            measure(client, 8 * MIB)
        assert set(left_over(client)) == {0}
        assert client.admin.stats().num_leases == num_leases


class ForgetfulClient(Client):
    """Removes blocks between a lookup and its get, as another client may."""

    def get(self, namespace: Any, lease_id: int, runs: Any, drain: Any, **options: Any) -> Any:
        self.admin.remove(namespace, runs)
        return super().get(namespace, lease_id, runs, drain, **options)


def test_blocks_that_leave_the_pool_meanwhile_are_an_error(shared_server: ServerProcess) -> None:
    with (
        ForgetfulClient(ClientConfig(endpoint=shared_server.endpoint, timeout_ms=10_000)) as client,
        pytest.raises(OutOfSpaceError, match="evicted blocks of the measurement"),
    ):
        measure(client, 4 * MIB)


# What a hit costs


@given(window=st.integers(1, 5_000), tp_size=st.sampled_from([1, 2, 4]))
def test_a_hit_has_all_tokens_or_the_last_window_or_one_state(window: int, tp_size: int) -> None:
    full = group_spec(chunk_bytes=1_600, num_shards=4)
    windowed = dataclasses.replace(full, kind="sliding_window", window_tokens=window)
    state = dataclasses.replace(full, kind="mamba")
    assert hit_bytes(full, tp_size) == HIT_TOKENS * 100 * 4 // tp_size
    assert hit_bytes(windowed, tp_size) == min(HIT_TOKENS, window) * 100 * 4 // tp_size
    assert hit_bytes(state, tp_size) == 1_600 * 4 // tp_size


def measurement(rate: float = 1.0, **fields: Any) -> dict[str, Any]:
    """A measurement that is limited by room; `rate` in GB/s."""
    rates = {"median": rate, "lowest": rate / 2, "highest": 2 * rate}
    found = {"transport": "shm", "round_trip_ms": 1.0, "one_block_ms": 2.0, "put_gb_per_s": rates}
    found |= {"get_gb_per_s": rates, "rounds": 5, "put_round_bytes": 256 * MIB, "get_round_bytes": 256 * MIB}
    found |= {"region_bytes": 6_400, "limited_by": "room", "free_bytes": 999 * MIB, "evicted_blocks": 1_234_567}
    return found | fields


def namespace_of(*groups: GroupSpec) -> pb.NamespaceInfo:
    return pb.NamespaceInfo(spec=encode_spec(namespace_spec(*groups)), fingerprint=b"f" * 32)


def test_a_hit_costs_its_calls_and_its_bytes() -> None:
    group = group_spec(chunk_bytes=1_600, num_shards=4)
    one = hit_cost(measurement(rate=1e-3), namespace_of(group), 1, prefill=None)
    assert (one["namespace"], one["tokens"], one["bytes"]) == ((b"f" * 32).hex(), 1_000, 400_000)
    assert one["load_ms"] == pytest.approx(2 + (400_000 - 6_400) / 1e3)
    assert one["pays_below_tokens_per_s"] == pytest.approx(1_000 / (one["load_ms"] / 1e3))
    both = hit_cost(measurement(rate=1e-3), namespace_of(group, group), 1, prefill=None)
    assert both["load_ms"] == pytest.approx(one["load_ms"] + 400_000 / 1e3 + 1)
    large = measurement(region_bytes=one["bytes"] + 1)
    assert hit_cost(large, namespace_of(group), 1, prefill=None)["load_ms"] == 2


@given(
    rate=st.floats(1e-6, 1e3),
    fields=st.fixed_dictionaries(
        {
            "round_trip_ms": st.floats(1e-3, 1e5),
            "one_block_ms": st.floats(1e-3, 1e5),
            "limited_by": st.sampled_from(["", "room", "time"]),
            "region_bytes": st.integers(1, 1 << 40),
        }
    ),
    chunk_bytes=st.integers(1, 1 << 35),
    prefill=st.none() | st.floats(1, 1e7),
)
def test_what_was_found_is_said_in_80_columns(
    rate: float, fields: dict[str, Any], chunk_bytes: int, prefill: float | None
) -> None:
    found = measurement(rate, **fields)
    hit = hit_cost(found, namespace_of(group_spec(chunk_bytes=chunk_bytes)), 1, prefill)
    lines = measurement_text(found | {"hit": hit}).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(re.search(r"e\+\d+ m?s", line) for line in lines)
    assert any("free" in line for line in lines) == (found["limited_by"] == "room")
    if prefill is None:
        assert "saved_ms" not in hit
        return
    assert (hit["saved_ms"] > 0) == ("saves" in lines[-1])
    if prefill != pytest.approx(hit["pays_below_tokens_per_s"]):
        assert (prefill < hit["pays_below_tokens_per_s"]) == (hit["saved_ms"] > 0)
