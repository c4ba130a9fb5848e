"""Requests in pieces: none is lost, none is larger than a message, and a server takes them for what they were."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.client.admin import InlineChunks
from kvpool.client.client import Client
from kvpool.client.lookup_stream import LookupStream, StreamedError
from kvpool.client.rpc import Namespace
from kvpool.protocol import types
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.messages import MESSAGE_BYTES, pieces
from kvpool.protocol.types import BlockRun, Chunk, Located, PoolKey, PutStatus, in_parts, join_located
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.rpc.buffers import MAX_REQUEST_BYTES
from tests.conftest import Connect
from tests.kvpool.test_lookup_stream import Asking
from tests.support.processes import ServerProcess
from tests.support.values import group_spec, namespace_spec

BLOCKS = [nth.to_bytes(32, "big") for nth in range(2 * MESSAGE_BYTES // 32)]
SHARDS, TIMEOUT_S = 64, 30.0
salts = itertools.count()


@given(st.integers(-2, 2), st.integers(0, 3))
def test_the_last_piece_alone_is_shorter(more: int, whole: int) -> None:
    request = bytes(max(0, whole * MESSAGE_BYTES + more))
    *first, last = pieces(request)
    assert b"".join([*first, last]) == request
    assert {len(each) for each in first} <= {MESSAGE_BYTES} and len(last) < MESSAGE_BYTES


def test_parts_of_an_answer_are_one_that_ends_with_the_first() -> None:
    parts = [Located(500, (True, False), (0,), (7, 8)), Located(400, (True,), (64,), (9, 10))]
    assert join_located(parts) == Located(400, (True, False, True), (0, 64), (7, 8, 9, 10))


@given(st.lists(st.integers(0, 7), max_size=8), st.integers(1, 9), st.integers(1, 4))
def test_parts_of_runs_are_the_same_blocks_and_keep_to_the_bounds(
    lengths: list[int], max_blocks: int, max_runs: int
) -> None:
    hashes = iter(range(100))
    runs = [BlockRun(0, [bytes([next(hashes)]) for _ in range(length)], b"p") for length in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(types, "MAX_RUNS", max_runs)
        parts = list(in_parts(runs, max_blocks))
    assert all(1 <= sum(map(len, part)) <= max_blocks and len(part) <= max_runs for part in parts)
    before: dict[bytes, bytes] = {}
    for run in runs:
        before.update(zip(run.block_hashes, [b"p", *run.block_hashes], strict=False))
    found = [piece for part in parts for piece in part]
    assert [name for piece in found for name in piece.block_hashes] == [n for run in runs for n in run.block_hashes]
    assert all(piece.parent_hash == before[piece.block_hashes[0]] for piece in found)


@pytest.fixture
def opened(shared_server: ServerProcess, connect: Connect) -> tuple[Client, Namespace]:
    client = connect(shared_server, transport="grpc", timeout_ms=30_000)
    spec = namespace_spec(group_spec(chunk_bytes=1, num_shards=SHARDS), salt=f"{next(salts)}")
    return client, client.open_namespace(spec)


def test_requests_of_every_kind_arrive_whole(opened: tuple[Client, Namespace]) -> None:
    """PutEnd has 8 bytes a chunk, GetChunks a key a chunk; Lookup goes over a stream, Exists as a call."""
    client, namespace = opened
    run = BlockRun(0, BLOCKS[: MESSAGE_BYTES // (SHARDS * 8) + 1])
    client.put_blocks(namespace, run, [bytes(SHARDS)] * len(run))
    long = BlockRun(0, [*run.block_hashes, *BLOCKS[len(run) :]])
    assert client.lookup(namespace, [long]).hits[0].num_leading == len(run)
    assert client.rpc.exists(namespace.fingerprint, [long]).hits[0].num_leading == len(run)
    keys = [PoolKey(namespace.fingerprint, 0, block, 0) for block in BLOCKS[: MESSAGE_BYTES // 64]]
    found = InlineChunks(client.rpc).get(keys)
    assert [chunk is not None for chunk in found] == [nth < len(run) for nth in range(len(keys))]


def test_a_chunk_larger_than_a_message_is_put(opened: tuple[Client, Namespace]) -> None:
    client, payload = opened[0], bytes(range(256)) * (3 * MESSAGE_BYTES // 256)
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=len(payload)), salt=f"{next(salts)}"))
    key, inline = PoolKey(namespace.fingerprint, 0, BLOCKS[0], 0), InlineChunks(client.rpc)
    assert inline.put([Chunk(key, payload, checksum(payload))]) == (PutStatus.GRANTED,)
    (chunk,) = inline.get([key])
    assert chunk is not None and chunk.payload == payload


def test_too_large_a_request_is_refused_and_the_stream_of_lookups_goes_on(opened: tuple[Client, Namespace]) -> None:
    client, namespace = opened
    too_long, right = BlockRun(0, BLOCKS[:1] * (MAX_REQUEST_BYTES // 32 + 1)), BlockRun(0, BLOCKS[:4])
    pending = [client.rpc.lookup_async(namespace, [run]) for run in (right, too_long, right, right)]
    for nth, each in enumerate(pending):
        if nth == 1:
            with pytest.raises(InvalidRequestError, match="the limit is 4 MiB"):
                each.result(TIMEOUT_S)
        else:
            found = each.result(TIMEOUT_S)
            assert found is not None and not found.hits[0].num_leading


class OlderServer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Takes each message for a request, as releases did that knew no pieces."""

    def service(self, _: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._answers)

    def _answers(self, messages: Iterator[bytes], _: Any) -> Iterator[bytes]:
        for message in messages:
            try:
                found = pb.LookupResponse(lease_ttl_ms=pb.LookupRequest.FromString(message).lease_ttl_ms)
                yield pb.LookupReply(found=found).SerializeToString()
            except Exception:
                yield pb.LookupReply(error=pb.CallError(code=3, message="no LookupRequest")).SerializeToString()


@contextmanager
def older_server() -> Iterator[LookupStream]:
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((OlderServer(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, closing(LookupStream(channel)) as lookups:
        yield lookups
    server.stop(None).wait()


def test_no_answer_of_an_older_server_is_taken_for_another_lookups() -> None:
    with older_server() as lookups:
        asked: list[Any] = [Asking(1), Asking(2, padding_bytes=3 * MESSAGE_BYTES), *map(Asking, range(3, 40))]
        pending = [lookups.future(each, TIMEOUT_S) for each in asked]
        with pytest.raises(StreamedError, match="no LookupRequest"):
            pending[1].result()
        del pending[1]
        assert [each.result().lease_ttl_ms for each in pending] == [1, *range(3, 40)]
