"""Calls beside those of engines: those of operators and of the command `kvpool`, hints, and puts and gets whose bytes
travel inside the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import grpc

from kvpool.client.rpc import Namespace, PoolRpc
from kvpool.client.transport_choice import Choice, choose
from kvpool.protocol import replies, wire
from kvpool.protocol.errors import ChecksumError, InvalidReplyError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.messages import checked
from kvpool.protocol.types import BlockRun, Chunk, HintKind, PoolKey, PutStatus, Quota
from kvpool.v1 import pool_pb2 as pb

MAX_PARTS = 64
"""Of a ledger: four times as many as a server has if all its parts are full."""
MAX_CHUNKS_BYTES, MAX_CHUNKS = 4 << 20, 4_096
"""Most bytes, a server's limit but for a single chunk, and most chunks of one message of `InlineChunks`."""
_FRAME_BYTES = 8
"""Most bytes that a message has for each chunk, beside the chunk's own."""


class Admin:
    """Operators' calls, on a client's connection. Thread-safe.

    Answers are messages of the contract, whose fields `kvpool/v1/pool.proto` explains. Their numbers are in bounds, and
    what cannot be printed in their texts is escaped.

    Raises (every method): UnavailableError, PoolTimeoutError, InvalidReplyError, and what its docstring names.
    """

    def __init__(self, rpc: PoolRpc):
        self._rpc = rpc

    def ping(self) -> pb.PingResponse:
        """The server's version, age and protocol, and whether the server drains."""
        return replies.ping(self._rpc.ping())

    def whoami(self) -> pb.WhoAmIResponse:
        """Who the server takes this client for."""
        reply: pb.WhoAmIResponse = self._rpc.call(self._rpc.stub.WhoAmI, pb.WhoAmIRequest())
        return checked(reply)

    def try_transport(self) -> Choice:
        """Attaches to the server as `Client.open_namespace` does, and raises as it. Close the choice's transport."""
        return choose(self._rpc.config, replies.offer(self._rpc.ping()), self._rpc.channel)

    def stats(self) -> pb.StatsResponse:
        """What the pool holds, its counters, and how the server, its tiers and the engines that report are."""
        return replies.stats(self._rpc.call(self._rpc.stub.Stats, pb.StatsRequest()))

    def namespaces(self, *, holdings: bool = True) -> list[pb.NamespaceInfo]:
        """Every open namespace, in the order of their opening.

        Without `holdings`, what each one holds is omitted, for which the server would visit every entry.
        """
        request = pb.ListNamespacesRequest(without_holdings=not holdings)
        return replies.namespaces(self._rpc.call(self._rpc.stub.ListNamespaces, request))

    def value(self) -> pb.ValueResponse:
        """What smaller and larger arenas would hit: of the caller's tenant, or of all for an operator."""
        reply: pb.ValueResponse = self._rpc.call(self._rpc.stub.Value, pb.ValueRequest())
        return checked(reply)

    def quotas(self) -> list[pb.Quota]:
        """Every quota, by subject."""
        return list(self._list_quotas().quotas)

    def pin_budgets(self) -> list[pb.PinBudget]:
        """What each tenant with open namespaces may pin, and has pinned; none from a server of an older release."""
        return list(self._list_quotas().pin_budgets)

    def _list_quotas(self) -> pb.ListQuotasResponse:
        reply: pb.ListQuotasResponse = self._rpc.call(self._rpc.stub.ListQuotas, pb.ListQuotasRequest())
        return checked(reply)

    def set_quotas(self, quotas: Iterable[Quota | pb.Quota]) -> list[pb.Quota]:
        """Sets quotas, and deletes those of 0 bytes; returns all quotas after that.

        Blocks beyond a subject's new quota are evicted at once, except leased ones and those being written. Raises
        InvalidRequestError if one of the quotas is invalid; none is set.
        """
        request = pb.SetQuotasRequest(quotas=wire.encode_quotas(quotas))
        return list(checked(self._rpc.call(self._rpc.stub.SetQuotas, request)).quotas)

    def ledger(self, since: int, until: int = 0) -> pb.LedgerResponse:
        """The ledger of hours that end after `since` and begin before `until`, in Unix time; 0: now."""
        whole = pb.LedgerResponse()
        for _ in range(MAX_PARTS):  # The server answers in parts.
            request = pb.LedgerRequest(since=since, until=until)
            part = checked(self._rpc.call(self._rpc.stub.Ledger, request))
            whole.MergeFrom(part)
            if part.next_since <= since:
                whole.next_since = 0
                return whole
            since = part.next_since
        raise InvalidReplyError(f"the server's ledger has more than {MAX_PARTS} parts")

    def explain(
        self, fingerprint: bytes, runs: Sequence[BlockRun], *, timeout_ms: int | None = None
    ) -> pb.ExplainResponse:
        """What the server knows of a prompt's blocks, one run a group, named as on the wire (`PoolRpc.name_of`).

        Raises UnknownNamespaceError, InvalidRequestError.
        """
        request = pb.ExplainRequest(namespace=fingerprint, runs=wire.encode_runs(runs))
        return replies.explanation(self._rpc.call(self._rpc.stub.Explain, request, timeout_ms), runs)

    def drain(self, deadline_ms: int = 0, boot_token: int = 0) -> pb.DrainResponse:
        """Takes the server out of service, and says how far the drain is; further calls say it again.

        The server refuses new leases and tickets, lets the live ones end, writes what its tiers lack, and stops.

        Args:
            deadline_ms: until the server stops, whatever is unfinished then, at most `MAX_DRAIN_MS`; 0: the server's
                drain_ms. Of several calls the earliest deadline counts.
            boot_token: of the server that drains: further calls must not drain its successor. 0: of any.

        Raises InvalidRequestError, and UnavailableError from a server with another boot token.
        """
        request = pb.DrainRequest(deadline_ms=deadline_ms, boot_token=boot_token)
        reply: pb.DrainResponse = self._rpc.call(self._rpc.stub.Drain, request)
        return checked(reply)

    def hint(
        self,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        kind: HintKind,
        *,
        pin_seconds: int = 0,
        timeout_ms: int | None = None,
    ) -> pb.HintResponse:
        """As `Hints`, of blocks given under their names on the wire. A pin of 0 s ends pins."""
        return self._rpc.hint(fingerprint, wire.encode_runs(runs), kind, pin_seconds, timeout_ms)

    def remove(self, namespace: Namespace, runs: Sequence[BlockRun], *, timeout_ms: int | None = None) -> int:
        """Drops blocks; returns how many of them the pool had."""
        request = pb.RemoveRequest(namespace=namespace.fingerprint, runs=self._rpc.encode_runs(runs))
        reply = self._rpc.call(self._rpc.stub.Remove, request, timeout_ms)
        return replies.count("num_removed", reply.num_removed, sum(map(len, runs)))

    def clear(self, fingerprint: bytes = b"", *, timeout_ms: int | None = None) -> int:
        """Drops every block of one namespace, or of all if `fingerprint` is empty; returns how many there were."""
        request = pb.ClearRequest(namespace=fingerprint)
        return int(self._rpc.call(self._rpc.stub.Clear, request, timeout_ms).num_removed)

    def verify(self, namespace: Namespace, runs: Sequence[BlockRun]) -> tuple[int, int]:
        """Lets the server compare blocks with their checksums; returns the numbers of (checked, dropped) blocks."""
        request = pb.VerifyRequest(namespace=namespace.fingerprint, runs=self._rpc.encode_runs(runs))
        reply = self._rpc.call(self._rpc.stub.Verify, request)
        num_checked = replies.count("num_checked", reply.num_checked, sum(map(len, runs)))
        return num_checked, replies.count("num_dropped", reply.num_dropped, num_checked)


class Hints:
    """What a client knows better than any eviction policy: which prefixes come back, which do not, and which come soon.

    A hint changes the order of evictions, or what is in memory; nothing else. It names a prefix from its beginning, one
    run a group: blocks behind one that is not stored, or that the tenant's budget has no room for, are not pinned.
    Thread-safe.

    Raises (every method): UnavailableError, PoolTimeoutError, InvalidReplyError, InvalidRequestError,
    UnknownNamespaceError, PermissionDeniedError, and what its docstring names.
    """

    def __init__(self, rpc: PoolRpc):
        self._rpc = rpc

    def pin(self, namespace: Namespace, runs: Sequence[BlockRun], seconds: int) -> pb.HintResponse:
        """Has the stored blocks of a prefix evicted after all that are not pinned, for 1 second to a day.

        A pin that ends later stays as it is.
        """
        return self._rpc.hint(namespace.fingerprint, self._rpc.encode_runs(runs), HintKind.PIN, max(1, seconds))

    def unpin(self, namespace: Namespace, runs: Sequence[BlockRun]) -> pb.HintResponse:
        """Ends the pins of a prefix, from its end to where other stored prefixes branch off."""
        return self._rpc.hint(namespace.fingerprint, self._rpc.encode_runs(runs), HintKind.PIN)

    def expire(self, namespace: Namespace, runs: Sequence[BlockRun]) -> pb.HintResponse:
        """Has the blocks of a prefix evicted before all others, until they are used again: from its end to where other
        stored prefixes branch off, or to a pinned block."""
        return self._rpc.hint(namespace.fingerprint, self._rpc.encode_runs(runs), HintKind.EXPIRE)

    def prefetch(self, namespace: Namespace, runs: Sequence[BlockRun]) -> pb.HintResponse:
        """Has the server bring the blocks of a prefix up from its tiers; does not wait until they are up.

        Give one run a group: the server refuses more. Repeat the call to learn how far the server has come. Raises
        OutOfSpaceError if too many prefetches are under way.
        """
        return self._rpc.hint(namespace.fingerprint, self._rpc.encode_runs(runs), HintKind.PREFETCH)


class InlineChunks:
    """Chunks by their keys, without regions and tickets: clients in any language can make these calls. Thread-safe."""

    def __init__(self, rpc: PoolRpc):
        self._rpc = rpc

    def put(self, chunks: Sequence[Chunk]) -> tuple[PutStatus, ...]:
        """Stores chunks; returns one status a chunk.

        Raises InvalidRequestError or ChecksumError for a chunk that is malformed or differs from its checksum,
        InvalidReplyError for an answer that is not of these chunks, and OutOfSpaceError.
        """
        named = _messages(map(self._named, chunks))
        reply = self._rpc.call(self._rpc.stub.PutChunks, named, self._rpc.config.data_timeout_ms)
        return replies.put_statuses(reply, len(chunks))

    def get(self, keys: Sequence[PoolKey]) -> list[Chunk | None]:
        """The chunks of `keys`, verified; None for each miss.

        Raises ChecksumError for wrong bytes, InvalidReplyError for an answer that is not of these keys.
        """
        found: list[Chunk | None] = []
        named = [self._named_key(key) for key in keys]
        request = pb.GetChunksRequest(keys=[wire.message_of(key, pb.PoolKey) for key in named])
        call = self._rpc.call(self._rpc.stub.GetChunks, request, self._rpc.config.data_timeout_ms)
        try:
            for nth, reply in enumerate(call):
                chunk = replies.chunk(reply, nth, named)
                if chunk is not None and checksum(chunk.payload) != chunk.checksum:
                    raise ChecksumError(
                        f"chunk {chunk.key.block_hash.hex()} shard {chunk.key.shard} differs from its checksum; "
                        "treat it as a miss"
                    )
                found.append(chunk and replace(chunk, key=keys[nth]))
        except grpc.RpcError as error:
            raise wire.error_of(error, self._rpc.config.endpoint) from None
        finally:
            call.cancel()  # Nothing more is read after an error.
        if len(found) != len(keys):
            raise InvalidReplyError(f"the server answered {len(found)} of {len(keys)} keys")
        return found

    def _named(self, chunk: Chunk) -> Chunk:
        """The chunk under its block's name on the wire."""
        parent = chunk.parent_hash and self._rpc.name_of(chunk.parent_hash)
        return replace(chunk, key=self._named_key(chunk.key), parent_hash=parent)

    def _named_key(self, key: PoolKey) -> PoolKey:
        return replace(key, block_hash=self._rpc.name_of(key.block_hash))


def _messages(chunks: Iterable[Chunk]) -> Iterator[pb.PutChunksRequest]:
    message, nbytes = pb.PutChunksRequest(), 0
    for chunk in chunks:
        encoded = wire.encode_chunk(chunk)
        size = encoded.ByteSize() + _FRAME_BYTES
        if message.chunks and (nbytes + size > MAX_CHUNKS_BYTES or len(message.chunks) == MAX_CHUNKS):
            yield message
            message, nbytes = pb.PutChunksRequest(), 0
        message.chunks.append(encoded)
        nbytes += size
    if message.chunks:
        yield message
