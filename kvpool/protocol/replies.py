"""Replies of a server, each bounded by its request: the only way from a reply to a value that clients act on.

A server may be broken, hostile or of another release. So every function here checks a reply before `wire.py`
decodes the reply, and raises InvalidReplyError, which names the field, its value and its bound. Time and memory are in
proportion to what was asked, never to what a reply claims; the size of a reply that is parsed at all is bounded by
`LookupQuestion.max_reply_bytes` and by `METHOD_LIMITS`. Text is cut and escaped for logs and terminals.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kvpool.protocol import wire
from kvpool.protocol.errors import InvalidReplyError, InvalidRequestError
from kvpool.protocol.messages import MAX_NUMBER, MAX_TEXT_CHARS, checked
from kvpool.protocol.namespace import GroupSpec
from kvpool.protocol.text import escaped
from kvpool.protocol.types import (
    HASH_BYTES,
    INT_BYTES,
    MAX_MISSES,
    MAX_RANGES,
    NONCE_BYTES,
    PERMIT_BYTES,
    PERMIT_KEY_BYTES,
    TOKEN_BYTES,
    BlockRun,
    Chunk,
    Existence,
    Located,
    Lookup,
    MissCause,
    PoolKey,
    PutGrant,
    PutReceipt,
    PutStatus,
    ShardRange,
)
from kvpool.v1 import pool_pb2 as pb

MAX_ARENA_BYTES = 1 << 56
"""Bound of an arena whose size the server does not tell: the data port and gRPC check offsets themselves."""
MAX_TTL_MS = 3_600_000
"""Longest lease that a server may be configured to give."""
MAX_RETRY_AFTER_MS = 60_000
MAX_BATCH_BLOCKS = 1 << 20
MAX_AGE_S = 1e10
MAX_HOST_CHARS = 253

METHOD_LIMITS = {"Get": 40 << 20, "Exists": 4 << 20, "Lookup": 40 << 20, "ListNamespaces": 24 << 20, "Ledger": 8 << 20,
                 "GetChunks": wire.MAX_MESSAGE_BYTES,
                 "LookupStream": wire.MAX_MESSAGE_BYTES}  # fmt: skip
"""Largest reply by method, bytes; `CONTROL_LIMIT` for all others. A message of small parts takes up to 60 times as much
memory once parsed."""
CONTROL_LIMIT = 1 << 20

_HOST = re.compile(r"[A-Za-z0-9._:%-]+")  # A name, an IPv4 address, or an IPv6 address without its brackets.
_SESSION = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_REPLY_SLACK_BYTES = 20_480
_RUN_SLACK_BYTES = 256


def _in(field_name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # Not a number is in no range.
        raise InvalidReplyError(f"the server's {field_name} is {value}, not within {low} to {high}")


def _is(field_name: str, value: object, expected: object) -> None:
    if value != expected:
        raise InvalidReplyError(f"the server's {field_name} is {value!r}, not {expected!r}")


def _text(field_name: str, value: str, most: int) -> None:
    if len(value) > most:
        raise InvalidReplyError(f"the server's {field_name} has {len(value)} characters; {most} are allowed")


def _permit(permit: bytes) -> None:
    if permit and len(permit) != PERMIT_BYTES + PERMIT_KEY_BYTES:  # With a key where the data port is sealed.
        _is("permit's size", len(permit), PERMIT_BYTES)


def ping(reply: pb.PingResponse) -> pb.PingResponse:
    """The server's version and age. `offer` checks the transports."""
    _text("version", reply.version, 64)
    _in("uptime_seconds", reply.uptime_seconds, 0, MAX_AGE_S)
    reply.version = escaped(reply.version, 64)
    return reply


def opened(reply: pb.OpenNamespaceResponse) -> pb.OpenNamespaceResponse:
    """An opened namespace and its transports; whether its fingerprint is the spec's is the caller's to check."""
    _is("fingerprint's size", len(reply.fingerprint), HASH_BYTES)
    _in("max_batch_blocks", reply.max_batch_blocks, 1, MAX_BATCH_BLOCKS)
    return offer(reply)


_O = TypeVar("_O", pb.OpenNamespaceResponse, pb.PingResponse)


def offer(reply: _O) -> _O:
    """A reply with the transports that a server offers; addresses are checked for their form alone."""
    _in("piece_bytes", reply.piece_bytes, 1, wire.MAX_MESSAGE_BYTES)
    if reply.HasField("segment"):
        _in("segment.nbytes", reply.segment.nbytes, 1, MAX_ARENA_BYTES)
        _is("segment.nonce's size", len(reply.segment.nonce), NONCE_BYTES)
        _is("segment.nonce_offset", reply.segment.nonce_offset, reply.segment.nbytes)
        _is("segment.token's size", len(reply.segment.token), TOKEN_BYTES)
    if reply.HasField("mooncake"):
        engine = reply.mooncake
        _in("mooncake.nbytes", engine.nbytes, 1, MAX_ARENA_BYTES)
        _in("mooncake.base_address", engine.base_address, 1, (1 << 64) - 1 - engine.nbytes - NONCE_BYTES)
        _is("mooncake.nonce's size", len(engine.nonce), NONCE_BYTES)
        _is("mooncake.nonce_offset", engine.nonce_offset, engine.nbytes)
        _text("mooncake.session", engine.session, MAX_HOST_CHARS + 8)
        parts = _SESSION.fullmatch(engine.session)
        if parts is None or not 0 < int(parts[2]) < 65_536:
            raise InvalidReplyError(f"the server's mooncake.session is {engine.session!r}, not HOST:PORT")
        if engine.protocol not in ("tcp", "rdma"):
            raise InvalidReplyError(f"the server's mooncake.protocol is {engine.protocol[:16]!r}, not tcp or rdma")
    if reply.HasField("data_port"):
        _in("data_port.port", reply.data_port.port, 1, 65_535)
        _is("data_port.nonce's size", len(reply.data_port.nonce), NONCE_BYTES)
        _text("data_port.host", reply.data_port.host, MAX_HOST_CHARS)
        if reply.data_port.host and not _HOST.fullmatch(reply.data_port.host):
            raise InvalidReplyError(f"the server's data_port.host is {reply.data_port.host!r}, not a host")
    return reply


def arena_bytes(offered: pb.OpenNamespaceResponse | pb.PingResponse) -> int:
    """Size of the arena that offsets must lie in; `MAX_ARENA_BYTES` where the offer does not tell."""
    return min(offered.segment.nbytes or MAX_ARENA_BYTES, offered.mooncake.nbytes or MAX_ARENA_BYTES)


@dataclass(frozen=True, slots=True)
class LookupQuestion:
    """A lookup, which makes its request and bounds its answer.

    Args:
        arena_bytes: see the function of that name.
        lease_ttl_ms: 0: without a lease.
        prefix_only, locate, explain: see `Client.lookup`.
        encode_runs: makes messages of runs, with the blocks' names on the wire.
        traceparent: of the client's span; empty if it makes none.
        here: nothing is to come up from a tier; with `bring_up` it is, for another server.
        asked_at: monotonic seconds.
    """

    fingerprint: bytes
    groups: Sequence[GroupSpec]
    arena_bytes: int
    runs: Sequence[BlockRun]
    lease_ttl_ms: int = 0
    prefix_only: bool = True
    locate: bool = False
    explain: bool = False
    encode_runs: Callable[[Sequence[BlockRun]], list[pb.BlockRun]] = wire.encode_runs
    traceparent: str = ""
    here: bool = False
    bring_up: bool = False
    asked_at: float = field(default_factory=time.monotonic)

    def __call__(self, wait_ms: int = 0) -> pb.LookupRequest:
        return pb.LookupRequest(
            namespace=self.fingerprint,
            runs=self.encode_runs(self.runs),
            prefix_only=self.prefix_only,
            lease_ttl_ms=self.lease_ttl_ms,
            locate=self.locate and self.lease_ttl_ms > 0,
            explain=self.explain,
            wait_ms=wait_ms,
            traceparent=self.traceparent,
            here=self.here,
            bring_up=self.bring_up,
        )

    @property
    def max_reply_bytes(self) -> int:
        """A larger message is no answer to this lookup, and need not be parsed."""
        num_ints = 1 + max((group.num_shards for group in self.groups), default=0)
        a_block = num_ints * INT_BYTES + 1
        return _REPLY_SLACK_BYTES + sum(_RUN_SLACK_BYTES + len(run) * a_block for run in self.runs)

    def answer(self, reply: pb.LookupResponse) -> Lookup:
        hits = reply.hits
        num_complete = self.check_hits(hits)
        offsets = [hit.offsets for hit in hits]  # Each look at a field of bytes copies them.
        if not self.lease_ttl_ms:
            _is("lease_id", reply.lease_id, 0)
        _in("lease_ttl_ms", reply.lease_ttl_ms, 0, self.lease_ttl_ms)
        _in("retry_after_ms", reply.retry_after_ms, 0, MAX_RETRY_AFTER_MS)
        if any(offsets):
            if not reply.lease_id or not self.locate:
                raise InvalidReplyError("the server's offsets are of blocks that are not leased, or not to be located")
            for nth, hit in enumerate(hits):
                self._check_slots(hit, self.runs[nth].group_idx, offsets[nth], num_complete[nth])
        return wire.decode_lookup(reply, self.fingerprint, self.asked_at)

    def check_hits(self, hits: Sequence[pb.RunHits]) -> list[int]:
        """How many blocks of each run are complete. Raises InvalidReplyError for hits of other runs."""
        if len(hits) != len(self.runs):
            raise InvalidReplyError(f"the server's hits are {len(hits)}, for {len(self.runs)} runs")
        num_complete = [self._num_complete(hit, len(run)) for hit, run in zip(hits, self.runs, strict=True)]
        for hit, run, complete in zip(hits, self.runs, num_complete, strict=True):
            _in("num_pending", hit.num_pending, 0, len(run) - complete)
            self._check_misses(hit, len(run))
        return num_complete

    def _num_complete(self, hit: pb.RunHits, count: int) -> int:
        """How many blocks of a run of `count` are complete, leading ones among them."""
        _in("num_leading", hit.num_leading, 0, count)
        if not hit.complete:
            return hit.num_leading
        if self.prefix_only:
            raise InvalidReplyError(f"the server's complete has {len(hit.complete)} bytes, for a lookup of prefixes")
        _in("complete's size", len(hit.complete), 1, (count + 7) // 8)
        complete = int.from_bytes(hit.complete, "little")
        if complete >> count:
            raise InvalidReplyError(f"the server's complete has bit {complete.bit_length() - 1}, for {count} blocks")
        leading = (~complete & complete + 1).bit_length() - 1
        _is("num_leading", hit.num_leading, leading)
        return complete.bit_count()

    def _check_misses(self, hit: pb.RunHits, count: int) -> None:
        if not hit.missing:
            return
        _in("number of causes", len(hit.missing), 0, MAX_MISSES if self.explain else 0)
        for miss in hit.missing:
            _in("cause", miss.cause, 0, max(MissCause))
        _in("counts of causes", min(miss.count for miss in hit.missing), 1, count)
        _is("missing blocks", sum(miss.count for miss in hit.missing), count - hit.num_leading)

    def _check_slots(self, hit: pb.RunHits, group_idx: int, offsets: bytes, num_complete: int) -> None:
        if not 0 <= group_idx < len(self.groups):
            raise InvalidReplyError(f"the server's hits are of group {group_idx}, which the namespace does not have")
        group = self.groups[group_idx]
        _is("offsets' size", len(offsets), num_complete * INT_BYTES)
        _is("checksums' size", len(hit.checksums), num_complete * group.num_shards * INT_BYTES)
        _permit(hit.permit)
        if num_complete:
            last = int(np.frombuffer(offsets, "<u8").max())
            _in("offsets", last, 0, self.arena_bytes - group.slot_bytes)


def existence(reply: pb.ExistsResponse, runs: Sequence[BlockRun]) -> Existence:
    """Of the blocks of some runs."""
    question = LookupQuestion(b"", (), 0, runs, prefix_only=False)
    num_complete = question.check_hits(reply.hits)
    _in("usable_tokens", reply.usable_tokens, 0, MAX_NUMBER if all(num_complete) else 0)
    _in("load_seconds", reply.load_seconds, 0, MAX_AGE_S)
    return Existence(wire.decode_hits(reply.hits), reply.usable_tokens, reply.load_seconds)


def grant(reply: pb.PutStartResponse, num_blocks: int, region_bytes: int, arena: int, ticket_ttl_ms: int) -> PutGrant:
    """Of `num_blocks` blocks with regions of `region_bytes`, in an arena of `arena` bytes."""
    _statuses(reply.statuses, num_blocks)
    num_granted = reply.statuses.count(PutStatus.GRANTED)
    _is("number of offsets", len(reply.offsets), num_granted)
    _is("ticket, whether there is one,", reply.ticket_id != 0, num_granted > 0)
    _in("ticket_ttl_ms", reply.ticket_ttl_ms, 0, ticket_ttl_ms)
    _in("offsets", max(reply.offsets, default=0), 0, max(0, arena - region_bytes))
    _permit(reply.permit)
    return wire.decode_grant(reply)


def _statuses(packed: bytes, count: int) -> None:
    _is("number of statuses", len(packed), count)
    if packed and (worst := max(packed)) > max(PutStatus):
        raise InvalidReplyError(f"the server's statuses have {worst}; {max(PutStatus):d} is the largest")


def receipt(reply: pb.PutEndResponse, num_chunks: int) -> PutReceipt:
    """Of a ticket with `num_chunks` chunks."""
    _in("num_committed", reply.num_committed, 0, num_chunks)
    _in("num_complete", reply.num_complete, 0, reply.num_committed)
    return wire.value_of(PutReceipt, reply)


def located(reply: pb.GetResponse, num_blocks: int, shards: ShardRange, chunk_bytes: int, arena: int) -> Located:
    """Of `num_blocks` blocks."""
    _is("number of blocks in present", len(reply.present), num_blocks)
    num_present = reply.present.count(1)
    _is("number of blocks not present", reply.present.count(0), num_blocks - num_present)
    _is("number of offsets", len(reply.offsets), num_present)
    _is("number of checksums", len(reply.checksums), num_present * shards.count)
    _in("lease_remaining_ms", reply.lease_remaining_ms, 0, MAX_TTL_MS)
    _in("offsets", max(reply.offsets, default=0), 0, max(0, arena - shards.count * chunk_bytes))
    _permit(reply.permit)
    return wire.decode_located(reply)


def count(field_name: str, value: int, most: int) -> int:
    """A number of things, of `most` that were named."""
    _in(field_name, value, 0, most)
    return value


def put_statuses(reply: pb.PutChunksResponse, num_chunks: int) -> tuple[PutStatus, ...]:
    """One status a chunk."""
    _statuses(reply.statuses, num_chunks)
    return wire.decode_statuses(reply.statuses)


def chunk(reply: pb.GetChunksResponse, nth: int, keys: Sequence[PoolKey]) -> Chunk | None:
    """The nth reply to a get of `keys`; None for a miss."""
    _in("number of chunks", nth + 1, 1, len(keys))
    _is("index", reply.index, nth)
    if not reply.found:
        return None
    try:
        found = wire.decode_chunk(reply.chunk)
    except InvalidRequestError as error:
        raise InvalidReplyError(f"the server's chunk: {error}") from None
    _is("chunk's key", found.key, keys[nth])
    return found


# Operators' calls: `checked`, and what holds between fields, or between a request and its reply


def namespaces(reply: pb.ListNamespacesResponse) -> list[pb.NamespaceInfo]:
    """Namespaces with valid specs."""
    for info in checked(reply).namespaces:
        _is("fingerprint's size", len(info.fingerprint), HASH_BYTES)
        try:
            wire.decode_spec(info.spec).check()
        except InvalidRequestError as error:
            raise InvalidReplyError(f"the server's spec: {escaped(str(error), MAX_TEXT_CHARS)}") from None
    return list(reply.namespaces)


def stats(reply: pb.StatsResponse) -> pb.StatsResponse:
    """A snapshot with the server's own part, whose histograms have one bucket more than ascending bounds."""
    bounds = checked(reply).server.rpc_seconds_bounds
    if not reply.HasField("server"):
        raise InvalidReplyError("the server's statistics have no part `server`")
    if list(bounds) != sorted(bounds):
        raise InvalidReplyError("the server's rpc_seconds_bounds do not ascend")
    for rpc in reply.server.rpcs:
        _is("number of buckets", len(rpc.buckets), len(bounds) + 1)
    return reply


def hint(reply: pb.HintResponse, num_blocks: int) -> pb.HintResponse:
    """What became of a hint that named so many blocks."""
    for name in ("num_blocks", "num_refused", "num_pending"):
        count(name, getattr(reply, name), num_blocks)
    return reply


def explanation(reply: pb.ExplainResponse, runs: Sequence[BlockRun]) -> pb.ExplainResponse:
    """What is known of some runs: of each its first blocks, in ranges without a gap."""
    _is("number of runs", len(checked(reply).runs), len(runs))
    for explained, run in zip(reply.runs, runs, strict=True):
        _is("group_idx", explained.group_idx, run.group_idx)
        at = 0
        for each in explained.ranges:
            _is("first block of a range", each.first, at)
            _in("count of a range", each.count, 1, len(run) - at)
            at += each.count
        _in("number of ranges", len(explained.ranges), 1, MAX_RANGES)
    return reply
