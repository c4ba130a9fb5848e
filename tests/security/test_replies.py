"""A server that lies: whatever it replies, a client has an answer to its request, or an error of kvpool.

`TEST_EFFORT` multiplies the replies that are tried: about 10,000 by default, 1,000,000 with TEST_EFFORT=100.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.internal.encoder import _VarintBytes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.client.block_io import InPlace
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.lookup_stream import StreamedError
from kvpool.commands.explain import PromptReport
from kvpool.commands.namespaces import text_of
from kvpool.commands.stats import row_of
from kvpool.protocol import replies, wire
from kvpool.protocol.errors import InvalidReplyError, KVPoolError, OutOfSpaceError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.messages import fields_of
from kvpool.protocol.replies import MAX_ARENA_BYTES, LookupQuestion
from kvpool.protocol.types import PERMIT_BYTES, BlockRun, Chunk, PoolKey, PutStatus, ShardRange
from kvpool.report.judgements import judgements
from kvpool.transport.base import Local, Transfer
from kvpool.transport.shm import ShmTransport
from kvpool.v1 import pool_pb2 as pb
from tests.support.cpu_time import MAX_CPU_S, LongestPart
from tests.support.effort import effort
from tests.support.held import held_by
from tests.support.lying_pool import LyingPool, altered
from tests.support.toy.fixtures import tiny_model, vllm_config
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of

__all__ = ["tiny_model", "vllm_config"]

PROMOTION_WAIT_MS, MAX_WAIT_S = 20, 5.0
NUM_SEEDS = effort(560)
"""Examples of the fuzzed client; each is about 20 replies."""
MAX_GROWTH_MIB = 100
"""Over all examples. The reply that the audit found took 2.8 GiB."""

RUN = run_of("a", "b", "c")
NONCE = bytes(16)
MISS = pb.Miss(count=1)
OFFER = {"piece_bytes": 1 << 20}
SEGMENT = {"token": bytes(16), "nbytes": 1 << 20, "nonce": NONCE, "nonce_offset": 1 << 20}
ENGINE = {**SEGMENT, "session": "10.0.0.1:12345", "protocol": "tcp", "base_address": 1 << 40}
del ENGINE["token"]
PORT = {"host": "10.0.0.1", "port": 50_052, "nonce": NONCE}


def question(**fields: Any) -> LookupQuestion:
    asked = {
        "prefix_only": True,
        "lease_ttl_ms": 1_000,
        "locate": True,
        "explain": True,
        "arena_bytes": 1 << 20,
        **fields,
    }
    return LookupQuestion(bytes(32), [group_spec(num_shards=2)], runs=[RUN], **asked)


def hit(**fields: Any) -> pb.RunHits:
    return pb.RunHits(num_leading=2, **fields)


def slots(*offsets: int, num_sums: int = 4, permit: bytes = b"") -> dict[str, bytes]:
    packed = np.array(offsets, "<u8").tobytes()
    return {"offsets": packed, "checksums": bytes(8 * num_sums), "permit": permit}


def found(*hits: pb.RunHits, **fields: Any) -> pb.LookupResponse:
    return pb.LookupResponse(hits=hits, **{"lease_id": 1, "lease_ttl_ms": 1_000, **fields})


def opened(**fields: Any) -> pb.OpenNamespaceResponse:
    return pb.OpenNamespaceResponse(fingerprint=bytes(32), max_batch_blocks=1, **{**OFFER, **fields})


def server(**fields: Any) -> pb.StatsResponse:
    return pb.StatsResponse(server=pb.ServerStats(**fields))


def info(**fields: Any) -> pb.ListNamespacesResponse:
    spec = wire.encode_spec(namespace_spec(salt="s"))
    return pb.ListNamespacesResponse(
        namespaces=[pb.NamespaceInfo(**{"fingerprint": bytes(32), "spec": spec, **fields})]
    )


def of_run(*ranges: tuple[int, int], **fields: Any) -> pb.ExplainResponse:
    """An explanation of one run whose ranges begin at a block and have so many."""
    parts = [pb.BlockRange(first=first, count=count) for first, count in ranges]
    return pb.ExplainResponse(runs=[pb.RunExplanation(ranges=parts, **fields)])


explained = functools.partial(replies.explanation, runs=[RUN])
ONE = ShardRange(0, 1)
grant = functools.partial(replies.grant, num_blocks=3, region_bytes=256, arena=1 << 20, ticket_ttl_ms=1_000)
located = functools.partial(replies.located, num_blocks=2, shards=ONE, chunk_bytes=256, arena=1 << 20)
chunk_of = functools.partial(replies.chunk, nth=0, keys=[PoolKey(bytes(32), 0, block_hash("a"), 0)])
GRANT = {"ticket_id": 1, "ticket_ttl_ms": 1_000, "statuses": bytes([0, 1, 0]), "offsets": [0, 256]}
LOCATED = {"present": b"\1\0", "offsets": [0], "checksums": [1], "lease_remaining_ms": 1_000}

# ruff: noqa: E501 - one reply a line
BROKEN: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "no hits": (question().answer, found(), "hits are 0, for 1 runs"),
    "hits too many": (question().answer, found(hit(), hit()), "hits are 2, for 1 runs"),
    "leading beyond the run": (question().answer, found(pb.RunHits(num_leading=(1 << 32) - 1)), "num_leading is 4294967295"),
    "pending beyond the run": (question().answer, found(hit(num_pending=2)), "num_pending is 2, not within 0 to 1"),
    "bitmap of a prefix": (question().answer, found(hit(complete=b"\3")), "complete has 1 bytes"),
    "bitmap too long": (question(prefix_only=False).answer, found(hit(complete=bytes(9))), "complete's size is 9"),
    "bit beyond the run": (question(prefix_only=False).answer, found(hit(complete=b"\x83")), "complete has bit 7"),
    "bitmap of other leading ones": (question(prefix_only=False).answer, found(hit(complete=b"\5")), "num_leading is 2"),
    "causes not asked for": (question(explain=False).answer, found(hit(missing=[MISS])), "number of causes is 1"),
    "causes too many": (question().answer, found(hit(missing=9 * [MISS])), "number of causes is 9"),
    "cause without a name": (question().answer, found(hit(missing=[pb.Miss(cause=7, count=1)])), "cause is 7"),
    "cause below": (question().answer, found(hit(missing=[pb.Miss(cause=-1, count=1)])), "cause is -1"),
    "causes of fewer": (question().answer, found(pb.RunHits(missing=[MISS])), "missing blocks is 1, not 3"),
    "cause of no block": (question().answer, found(pb.RunHits(missing=[pb.Miss()])), "counts of causes is 0"),
    "lease not asked for": (question(lease_ttl_ms=0).answer, found(hit()), "lease_id is 1"),
    "TTL": (question().answer, found(hit(), lease_ttl_ms=1_001), "lease_ttl_ms is 1001"),
    "retry": (question().answer, found(hit(), retry_after_ms=(1 << 32) - 1), "retry_after_ms is 4294967295"),
    "slots not asked for": (question(locate=False).answer, found(hit(**slots(0, 512))), "not to be located"),
    "slots without lease": (question().answer, found(hit(**slots(0, 512)), lease_id=0), "not leased"),
    "slots of fewer": (question().answer, found(hit(**slots(0))), "offsets' size is 8, not 16"),
    "checksums of fewer": (question().answer, found(hit(**slots(0, 512, num_sums=3))), "checksums' size is 24, not 32"),
    "slot beyond the arena": (question().answer, found(hit(**slots(0, (1 << 20) - 511))), "offsets is 1048065"),
    "slot beyond any arena": (question(arena_bytes=MAX_ARENA_BYTES).answer, found(hit(**slots(0, (1 << 64) - 1))), "offsets is 18446744073709551615"),
    "permit's size": (question().answer, found(hit(**slots(0, 512, permit=b"x"))), "permit's size is 1"),
    "statuses": (grant, pb.PutStartResponse(**{**GRANT, "statuses": b"\0\0"}), "number of statuses is 2"),
    "unknown status": (grant, pb.PutStartResponse(**{**GRANT, "statuses": b"\0\3\0"}), "statuses have 3"),
    "regions too many": (grant, pb.PutStartResponse(**{**GRANT, "offsets": [0, 0, 0]}), "number of offsets is 3"),
    "no ticket": (grant, pb.PutStartResponse(**{**GRANT, "ticket_id": 0}), "ticket, whether there is one, is False"),
    "ticket's TTL": (grant, pb.PutStartResponse(**{**GRANT, "ticket_ttl_ms": 1 << 31}), "ticket_ttl_ms is 2147483648"),
    "region beyond": (grant, pb.PutStartResponse(**{**GRANT, "offsets": [0, (1 << 64) - 1]}), "offsets is 18446744073709551615"),
    "committed": (functools.partial(replies.receipt, num_chunks=2), pb.PutEndResponse(num_committed=3), "num_committed is 3"),
    "complete": (functools.partial(replies.receipt, num_chunks=2), pb.PutEndResponse(num_complete=1), "num_complete is 1"),
    "present": (located, pb.GetResponse(**{**LOCATED, "present": b"\1"}), "number of blocks in present is 1"),
    "present otherwise": (located, pb.GetResponse(**{**LOCATED, "present": b"\1\2"}), "number of blocks not present is 0"),
    "no offsets": (located, pb.GetResponse(**{**LOCATED, "offsets": []}), "number of offsets is 0"),
    "no checksums": (located, pb.GetResponse(**{**LOCATED, "checksums": []}), "number of checksums is 0"),
    "offset": (located, pb.GetResponse(**{**LOCATED, "offsets": [1 << 20]}), "offsets is 1048576"),
    "lease's rest": (located, pb.GetResponse(**{**LOCATED, "lease_remaining_ms": (1 << 32) - 1}), "lease_remaining_ms is"),
    "another chunk": (chunk_of, pb.GetChunksResponse(found=True, chunk=pb.Chunk(key=pb.PoolKey(namespace=bytes(32), block_hash=block_hash("b")))), "chunk's key is"),
    "no chunk": (chunk_of, pb.GetChunksResponse(found=True), "namespace has 0 bytes"),
    "another index": (chunk_of, pb.GetChunksResponse(index=1), "index is 1"),
    "chunk too many": (functools.partial(chunk_of, nth=1), pb.GetChunksResponse(index=1), "number of chunks is 2"),
    "batch of none": (replies.opened, pb.OpenNamespaceResponse(fingerprint=bytes(32)), "max_batch_blocks is 0"),
    "pieces of none": (replies.opened, opened(piece_bytes=0), "piece_bytes is 0"),
    "segment's nonce": (replies.opened, opened(segment=pb.Segment(**{**SEGMENT, "nonce": b""})), "segment.nonce's size is 0"),
    "segment's size": (replies.opened, opened(segment=pb.Segment(**{**SEGMENT, "nbytes": 1 << 63})), "segment.nbytes is"),
    "segment's token": (replies.opened, opened(segment=pb.Segment(**{**SEGMENT, "token": b"x"})), "segment.token"),
    "engine's address": (replies.opened, opened(mooncake=pb.MooncakeEngine(**{**ENGINE, "base_address": (1 << 64) - 9})), "base_address is"),
    "engine's name": (replies.opened, opened(mooncake=pb.MooncakeEngine(**{**ENGINE, "session": "a b:1"})), "session is 'a b:1'"),
    "engine's port": (replies.opened, opened(mooncake=pb.MooncakeEngine(**{**ENGINE, "session": "a:99999"})), "session is 'a:99999'"),
    "engine's protocol": (replies.opened, opened(mooncake=pb.MooncakeEngine(**{**ENGINE, "protocol": "ftp"})), "protocol is 'ftp'"),
    "data port's port": (replies.opened, opened(data_port=pb.DataPort(**{**PORT, "port": 65_536})), "data_port.port is 65536"),
    "data port's host": (replies.opened, opened(data_port=pb.DataPort(**{**PORT, "host": "a b"})), "data_port.host is 'a b'"),
    "data port's nonce": (replies.opened, opened(data_port=pb.DataPort(**{**PORT, "nonce": b"x"})), "nonce's size is 1"),
    "version": (replies.ping, pb.PingResponse(version="v" * 65), "version has 65 characters"),
    "uptime": (replies.ping, pb.PingResponse(uptime_seconds=float("nan")), "uptime_seconds is nan"),
    "buckets": (replies.stats, server(rpc_seconds_bounds=[1, 2], rpcs=[pb.RpcStats(buckets=[1])]), "number of buckets is 1"),
    "no server": (replies.stats, pb.StatsResponse(), "the server's statistics have no part `server`"),
    "bounds": (replies.stats, server(rpc_seconds_bounds=[2, 1]), "rpc_seconds_bounds do not ascend"),
    "a field of stats": (replies.stats, server(uptime_seconds=float("nan")), "StatsResponse.server.uptime_seconds is nan"),
    "namespace": (replies.namespaces, info(fingerprint=b""), "fingerprint's size is 0"),
    "spec": (replies.namespaces, info(spec=pb.NamespaceSpec()), "model is empty"),
    "a field of namespaces": (replies.namespaces, info(age_seconds=float("inf")), "namespaces.age_seconds is inf"),
    "hint": (functools.partial(replies.hint, num_blocks=3), pb.HintResponse(num_refused=4), "num_refused is 4"),
    "runs of an explanation": (explained, pb.ExplainResponse(), "number of runs is 0"),
    "group of an explanation": (explained, of_run(group_idx=1), "group_idx is 1"),
    "no range": (explained, of_run(), "number of ranges is 0"),
    "a gap": (explained, of_run((0, 1), (2, 1)), "first block of a range is 2, not 1"),
    "an empty range": (explained, of_run((0, 0)), "count of a range is 0"),
    "ranges beyond the run": (explained, of_run((0, 4)), "count of a range is 4"),
    "a field of explanations": (explained, pb.ExplainResponse(remembered_seconds=-1), "remembered_seconds is -1"),
}  # fmt: skip
"""What -> how it is checked, the reply, and what the error says."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_reply_that_breaks_its_bounds_is_an_error_that_says_so(name: str) -> None:
    check, reply, said = BROKEN[name]
    with pytest.raises(InvalidReplyError, match=said):
        check(reply)


def test_replies_within_their_bounds_are_taken() -> None:
    assert question().answer(found(hit(**slots(0, 512, permit=bytes(PERMIT_BYTES))))).leased(0, 0, 2)
    assert question(prefix_only=False).answer(found(hit(complete=b"\3"))).hits[0].complete == 3
    assert grant(pb.PutStartResponse(**GRANT)).statuses == (PutStatus.GRANTED, PutStatus.PRESENT, PutStatus.GRANTED)
    assert located(pb.GetResponse(**LOCATED)).present == (True, False)
    offer = opened(segment=pb.Segment(**SEGMENT), mooncake=pb.MooncakeEngine(**ENGINE), data_port=pb.DataPort(**PORT))
    assert replies.arena_bytes(replies.opened(offer)) == 1 << 20
    assert explained(of_run((0, 1), (1, 2))).runs[0].ranges[1].count == 2


def test_text_of_a_server_is_cut_and_escaped() -> None:
    for code in grpc.StatusCode:
        if code is grpc.StatusCode.OK:
            continue
        error = wire.error_of(StreamedError(code, "line\nforged\x1b[2J" + "x" * 10_000), "host:1")
        assert str(error).isprintable()
        assert len(str(error)) < 2_500


# Over a real connection: what is refused before it is parsed


class Raw(grpc.GenericRpcHandler):
    """Answers every request for a method with the same bytes."""

    def __init__(self, replies_of: dict[str, bytes]):
        self._replies_of = replies_of

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        method = handler_call_details.method.rpartition("/")[2]
        if method == "LookupStream":
            return grpc.stream_stream_rpc_method_handler(self._stream)
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._replies_of[method])

    def _stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for _ in requests:
            yield self._replies_of["LookupStream"]


@contextmanager
def liar(**replies_of: bytes) -> Iterator[Client]:
    """A client of a gRPC server that replies so, by method."""
    server = grpc.server(ThreadPoolExecutor(4), handlers=[Raw(replies_of)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with Client(ClientConfig(f"127.0.0.1:{port}", timeout_ms=10_000)) as client:
            yield client
    finally:
        server.stop(None).wait()


def peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ask(client: Client) -> Any:
    return client.rpc.result(client.rpc.started(client.rpc._lookups, question()))


def test_a_reply_to_a_lookup_is_not_parsed_if_it_is_larger_than_any_answer() -> None:
    """16 MiB of hits without content would take 770 MiB."""
    empty_hits = _wrapped(b"\x12\0" * (8 << 20))
    before = peak_mib()
    with liar(LookupStream=empty_hits) as client, pytest.raises(InvalidReplyError, match="bytes; 20"):
        ask(client)
    assert peak_mib() - before < 200


def _wrapped(response: bytes) -> bytes:
    """A serialized LookupReply around a LookupResponse."""
    return b"\x0a" + _VarintBytes(len(response)) + response


def test_what_is_no_reply_to_a_lookup_ends_the_stream_alone() -> None:
    with liar(LookupStream=b"\xff" * 10) as client:
        for _ in range(3):
            with pytest.raises(InvalidReplyError, match="cannot be parsed"):
                ask(client)


@pytest.mark.parametrize("method", ["Ping", "Stats", "ListNamespaces"])
def test_a_reply_that_is_too_large_is_refused_unread(method: str) -> None:
    limit = replies.METHOD_LIMITS.get(method, replies.CONTROL_LIMIT)
    too_large = b"\xa2\x06" + _VarintBytes(limit) + bytes(limit)  # Field 100, which nobody knows.
    with liar(**{method: too_large}) as client:
        call = {"Ping": client.admin.ping, "Stats": client.admin.stats, "ListNamespaces": client.admin.namespaces}
        with pytest.raises(InvalidReplyError, match="too large"):
            call[method]()


@pytest.mark.parametrize(
    ("num_specs", "group_fields", "fields"),
    [(20, {"layer_names": ("",) * 32_000}, {}), (300, {}, {"page_format": "\u20ac" * 20_000})],
    ids=["many texts", "long texts"],
)
def test_whatever_specs_a_server_admits_operators_can_list_them(
    num_specs: int, group_fields: dict[str, Any], fields: dict[str, Any]
) -> None:
    pool = LyingPool()
    pool.alter = lambda _, reply: reply.SerializeToString()  # Honest, but a client parses it, up to its limits.
    client = pool.client(ClientConfig())
    for nth in range(num_specs):
        with suppress(OutOfSpaceError):
            tenant = str(4 - 5 * nth // num_specs or "")  # Those without a name, the last ones, may take what is left.
            client.open_namespace(namespace_spec(group_spec(**group_fields), tenant=tenant, **fields))
    assert sum(each.spec.nbytes for each in pool.pool.open_namespaces()) > 12 << 20, "the server is far from full"
    assert len(client.admin.namespaces()) == len(list(pool.pool.open_namespaces()))


def test_a_ledger_whose_parts_never_end_is_refused() -> None:
    pool, asked = LyingPool(), []

    def next_part(method: str, reply: Any) -> bytes:
        asked.append(method)
        return pb.LedgerResponse(next_since=len(asked)).SerializeToString()

    pool.alter = next_part
    with pytest.raises(InvalidReplyError, match="ledger has more than 64 parts"):
        pool.client(ClientConfig()).admin.ledger(0)
    assert asked == ["Ledger"] * 64


# A reader of shared memory with a writer beside it


@pytest.mark.parametrize("when", ["before the copy", "between copy and sum", "before the copy, undone before the sum"])
def test_a_load_never_delivers_bytes_that_differ_from_the_checksum(when: str) -> None:
    """Another process writes to the segment meanwhile."""
    arena, is_early = payload("arena", 4 * 256), when.startswith("before the copy")
    right = arena.copy().reshape(4, 256)
    loaded, sums = np.zeros_like(right), [0] * 4
    memory: Any = SimpleNamespace(bytes=arena, map_ahead=lambda: None, close=lambda: None)

    def drain(first: int, buffers: Any) -> None:
        if when == "between copy and sum":
            arena[...] ^= 0xFF
        loaded[first : first + len(buffers)] = buffers
        if when == "before the copy, undone before the sum":
            arena[...] ^= 0xFF

    def add(first: int, regions: Any) -> None:
        for nth, parts in enumerate(regions, first):
            sums[nth] = checksum(b"".join(part.tobytes() for part in parts))

    if is_early:
        arena[...] ^= 0xFF
    transport = ShmTransport(memory)
    transport.read(Transfer(1, [0, 256, 512, 768], 256, 10.0, batch_bytes=1024), Local(drain, sum=add))
    for nth, block in enumerate(right):
        if sums[nth] == checksum(block.tobytes()):
            assert (loaded[nth] == block).all(), "wrong bytes have the right checksum"
        else:
            assert is_early, "a right copy was refused"


# Whatever it is


class Caller:
    """Makes every call of a client to a pool that lies, and judges what comes back."""

    def __init__(self) -> None:
        self.pool = LyingPool()
        self.client = self.pool.client(ClientConfig(timeout_ms=5_000))
        self.spec = namespace_spec(group_spec(num_shards=2), salt="fuzz")
        self.namespace = self.client.open_namespace(self.spec)
        self.run = run_of(*range(6))
        self.blocks = [payload(nth, 512) for nth in range(6)]
        key = PoolKey(self.namespace.fingerprint, 0, self.run.block_hashes[0], 1)
        self.chunk = Chunk(key, self.blocks[0][256:].tobytes(), checksum(self.blocks[0][256:]))
        self.longest = LongestPart()

    def all_calls(self, dice: random.Random) -> None:
        client, namespace, run = self.client, self.namespace, self.run
        self.pool.clock.advance(1_000)
        self.pool.pool.clear()
        client.put_blocks(namespace, run, self.blocks)
        lease_id = client.lookup(namespace, [run]).lease_id
        others = run_of(*(f"{dice.random()}" for _ in range(3)))
        self.pool.alter = lambda _, reply: altered(reply, dice)
        try:
            self._try(lambda: client.open_namespace(self.spec))
            self._try(client.admin.ping)
            self._try(lambda: replies.offer(client.rpc.ping()))
            self._try(lambda: client.put_blocks(namespace, others, self.blocks[:3]))
            for prefix_only in (True, False):
                for locate in (True, False):
                    self._try(lambda: self._look_up(prefix_only, locate))  # noqa: B023
            self._try(lambda: self._judge(client.get_blocks(namespace, lease_id, run)))
            self._try(lambda: client.chunks.put([self.chunk]))
            self._try(self._get_chunks)
            self._try(lambda: json.dumps(row_of(stats := client.admin.stats(), judgements(stats))))
            self._try(lambda: [text_of(each, []) for each in client.admin.namespaces()])
            self._try(lambda: json.dumps(fields_of(client.admin.ledger(0)), allow_nan=False))
            self._try(lambda: json.dumps(fields_of(client.admin.value()), allow_nan=False))
            self._try(lambda: json.dumps([fields_of(each) for each in client.admin.quotas()]))
            self._try(lambda: json.dumps(self._explain()))
            self._try(lambda: client.admin.verify(namespace, [run]))
            self._try(lambda: client.admin.remove(namespace, [others]))
            self._try(lambda: client.release([lease_id]))
        finally:
            self.pool.alter = None

    def _try(self, call: Callable[[], object]) -> None:
        with self.longest.part(), suppress(KVPoolError):
            call()

    def _look_up(self, prefix_only: bool, locate: bool) -> None:
        found = self.client.lookup(self.namespace, [self.run], prefix_only=prefix_only, locate=locate)
        (hits,) = found.hits
        assert hits.num_leading <= 6 and hits.complete < 64 and hits.num_pending <= 6
        leased = found.leased(0, 0, hits.num_leading) if hits.num_leading else None
        if leased is not None:
            blocks = [np.empty(512, np.uint8) for _ in range(len(leased))]
            head = BlockRun(0, self.run.block_hashes[: len(leased)])
            self.client.get(self.namespace, found.lease_id, [head], InPlace(blocks), leased=leased)
            self._judge(blocks)

    def _explain(self) -> Any:
        found = self.client.admin.explain(self.namespace.fingerprint, [self.run])
        report = PromptReport(self.spec, 6 * 16, found)
        assert all(text.isprintable() for row in report.rows() for text in row)
        return report.as_json()

    def _get_chunks(self) -> None:
        for chunk in self.client.chunks.get([self.chunk.key]):
            assert chunk is None or chunk.payload == self.chunk.payload

    def _judge(self, blocks: Sequence[Any]) -> None:
        for block, right in zip(blocks, self.blocks, strict=False):
            assert block is None or (block == right).all(), "a lie became a block"


def test_no_reply_brings_a_client_down() -> None:
    caller, before = Caller(), peak_mib()

    @settings(max_examples=NUM_SEEDS)
    @given(st.integers(0, (1 << 64) - 1))
    def all_calls(seed: int) -> None:
        caller.all_calls(random.Random(seed))

    all_calls()
    caller.client.close()
    assert caller.pool.num_altered >= 15 * NUM_SEEDS
    assert caller.longest.seconds < MAX_CPU_S
    assert peak_mib() - before < MAX_GROWTH_MIB
    print(f"{caller.pool.num_altered} replies; the longest call took {caller.longest}")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_no_answer_to_a_lookup_brings_a_scheduler_down(
    vllm_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's side asks, promises, and begins loads, with its own breaker out of the way."""
    from tests.support.vllm_objects import cache_config, make_request, tokens
    from tests.vllm_plugin.core import NUM_BLOCKS, Core
    from vllm_plugin import session
    from vllm_plugin.scheduler import lookups

    pool = LyingPool()
    monkeypatch.setattr(session, "Client", pool.client)
    monkeypatch.setattr(lookups, "MAX_BEGIN_S", 1e9)
    monkeypatch.setattr(lookups, "MAX_WAIT_SHARE", 1e6)
    extra = {"endpoint": "127.0.0.1:1", "lookup_timeout_ms": 5_000, "decline_slow_loads": False}
    extra["promotion_wait_ms"] = PROMOTION_WAIT_MS
    core = Core(vllm_config(), extra, cache_config(num_blocks=NUM_BLOCKS)).connected()
    (its_session,) = core.side.stages.sessions
    its_session.report = lambda *_: None  # type: ignore[method-assign]
    namespace, prompt = its_session.namespace, tokens(100, "lied about")
    assert namespace is not None
    names = make_request("first", prompt).block_hashes[:5]
    slot_bytes = namespace.spec.groups[0].slot_bytes
    its_session.client.put_blocks(namespace, BlockRun(0, names), [payload(nth, slot_bytes) for nth in range(5)])
    longest, before, hits = LongestPart(), peak_mib(), 0

    def one_request(seed: int) -> None:
        nonlocal hits
        dice = random.Random(seed)
        pool.clock.advance(0.01)
        pool.alter = lambda _, reply: altered(reply, dice) if dice.random() < 0.9 else reply.SerializeToString()
        request = make_request(f"{seed}", prompt)
        with longest.part():
            began = time.monotonic()
            matched, is_async = core.side.matched_tokens(request, 0)
            while matched is None:  # The pool says that blocks are on their way up from a tier.
                assert time.monotonic() - began < MAX_WAIT_S
                matched, is_async = core.side.matched_tokens(request, 0)
            assert matched in range(0, 96, 16) and is_async == (matched > 0)
            hits += is_async
            core.allocate(request, matched)
            metadata = core.step()
            assert [job.request_id for job in metadata.loads] == [request.request_id] * is_async
            core.report(finished_recving={request.request_id} if is_async else set())
            core.side.request_finished(request, ([],))
            core.free(request)
            core.step()

    try:
        settings(max_examples=effort(2_000))(given(st.integers(0, (1 << 64) - 1))(one_request))()
        assert not any(held_by(core.side).values())
        assert hits > effort(100)
        assert longest.seconds < MAX_CPU_S
        assert peak_mib() - before < MAX_GROWTH_MIB
        print(f"{pool.num_altered} answers, {hits} hits; the longest request took {longest}")
    finally:
        pool.alter = None
        core.side.shutdown()
