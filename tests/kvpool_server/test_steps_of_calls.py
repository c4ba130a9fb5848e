"""Calls about many chunks, leases or blocks leave the loop to others between two steps, and end with their caller."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import grpc
import pytest

from kvpool.protocol import wire
from kvpool.protocol.hashing import checksum
from kvpool.protocol.types import BlockRun, ShardRange
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.steps import finish
from kvpool_server.rpc import chunks
from kvpool_server.sharing import Limits
from tests.support.in_process_server import InProcessServer
from tests.support.processes import wait_for
from tests.support.values import block_hash, group_spec, namespace_spec, run_of

CHUNK, NUM_LEASES, NUM_CHUNKS = 64, 8_000, 400
LARGE = chunks.MAX_LOCKED_BYTES + 64


@pytest.fixture
def server() -> Iterator[InProcessServer]:
    with closing(InProcessServer(16 << 20, 1 << 20, Limits(max_leases=4 * NUM_LEASES))) as server:
        yield server


def _filled(server: InProcessServer, count: int, chunk_bytes: int = CHUNK, num_shards: int = 1) -> bytes:
    """The fingerprint of a namespace with blocks 0, 1, ... of zeros."""
    spec = namespace_spec(group_spec(chunk_bytes=chunk_bytes, num_shards=num_shards))

    def fill() -> bytes:
        name = server.pool.open_namespace(spec)[0].fingerprint
        if count:
            grant = server.pool.put_start(name, [run_of(*range(count))], ShardRange(0, num_shards))
            server.pool.put_end(grant.ticket_id, [checksum(bytes(chunk_bytes))] * count * num_shards)
        return name

    return server.on_loop(fill)


def _chunks(name: bytes, count: int) -> pb.PutChunksRequest:
    keys = (pb.PoolKey(namespace=name, block_hash=block_hash(nth)) for nth in range(count))
    payload = bytes(CHUNK)
    return pb.PutChunksRequest(chunks=[pb.Chunk(key=key, payload=payload, checksum=checksum(payload)) for key in keys])


def _largest_step(server: InProcessServer, number: Callable[[], int], call: Callable[[], object]) -> int:
    """By how much a number changes between two passes of the server's loop at most, while a call is answered."""
    changes, last, is_answered = [0], number(), False

    def look() -> None:
        nonlocal last
        changes.append(abs(number() - last))
        last = number()
        if not is_answered:
            asyncio.get_running_loop().call_soon(look)

    server.on_loop(look)
    call()
    is_answered = True
    return server.on_loop(lambda: max(changes))


def test_chunks_of_one_message_are_stored_in_steps(server: InProcessServer) -> None:
    request = _chunks(_filled(server, 0), NUM_CHUNKS)
    stored = lambda: server.pool.counters["put_completed_blocks"]  # noqa: E731
    step = _largest_step(server, stored, lambda: server.stub.PutChunks(iter([request]), timeout=60))
    assert stored() == NUM_CHUNKS and step < 32


@pytest.mark.parametrize("method", ["Release", "Lookup"])
def test_leases_of_one_message_end_in_steps(server: InProcessServer, method: str) -> None:
    name = _filled(server, 1)
    lease = lambda: server.pool.lookup(name, [run_of(0)], prefix_only=True, lease_ttl_ms=60_000).lease_id  # noqa: E731
    ids = server.on_loop(lambda: [lease() for _ in range(NUM_LEASES)])
    request = pb.ReleaseRequest(lease_ids=ids) if method == "Release" else pb.LookupRequest(release=ids)
    ask = getattr(server.stub, method)
    assert _largest_step(server, lambda: len(server.pool.leases), lambda: ask(request, timeout=60)) < NUM_LEASES // 2
    assert not len(server.pool.leases)


@pytest.mark.parametrize(("chunk_bytes", "num_shards"), [(1, 64), (LARGE, 2)])
def test_only_chunks_that_are_hashed_without_pythons_lock_are_verified_in_a_thread(
    server: InProcessServer, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, num_shards: int
) -> None:
    name, threads, is_sound = _filled(server, 20, chunk_bytes, num_shards), set[int](), chunks.is_sound

    def noted(*args: Any) -> bool:
        threads.add(threading.get_ident())
        return is_sound(*args)

    monkeypatch.setattr(chunks, "is_sound", noted)
    (entry,) = server.on_loop(lambda: finish(server.pool.removals.complete(name, [run_of(7)])))
    server.memory[entry.offset + num_shards * chunk_bytes - 1] = 1  # The last byte of a block.
    request = pb.VerifyRequest(namespace=name, runs=wire.encode_runs([run_of(*range(20))]))
    reply = server.stub.Verify(request, timeout=60)
    assert (reply.num_checked, reply.num_dropped) == (20, 1)
    assert (server.on_loop(threading.get_ident) in threads) == (chunk_bytes == 1) and len(threads) == 1


@pytest.mark.parametrize("method", ["Verify", "PutChunks"])
def test_what_a_call_has_begun_ends_when_its_caller_hangs_up(
    server: InProcessServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A caller that hangs up and calls again would else have all of its calls, and their requests, under way."""
    name, num_done = _filled(server, NUM_CHUNKS if method == "Verify" else 0), 0
    checksum, is_sound = chunks.checksum, chunks.is_sound

    def slow(hashed: Callable[..., Any], *args: Any) -> Any:
        nonlocal num_done
        num_done += 1
        time.sleep(0.005)
        return hashed(*args)

    monkeypatch.setattr(chunks, "checksum", lambda *args: slow(checksum, *args))
    monkeypatch.setattr(chunks, "is_sound", lambda *args: slow(is_sound, *args))
    runs = wire.encode_runs([BlockRun(0, [block_hash(nth) for nth in range(NUM_CHUNKS)])])
    if method == "Verify":
        call = server.stub.Verify.future(pb.VerifyRequest(namespace=name, runs=runs), timeout=60)
    else:
        call = server.stub.PutChunks.future(iter([_chunks(name, NUM_CHUNKS)]), timeout=60)
    wait_for(lambda: num_done, "the first step")
    call.cancel()
    with suppress(grpc.FutureCancelledError):
        call.result()

    def is_over() -> bool:
        before = num_done
        time.sleep(0.25)
        return num_done == before

    wait_for(lambda: not len(server.pool.leases) and is_over(), "the end of the work")
    assert num_done < NUM_CHUNKS
