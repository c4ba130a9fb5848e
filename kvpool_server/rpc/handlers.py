"""What the handlers of all RPCs share: the parts of the server, the caller, and the reading of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.client.tracing import Tracing
from kvpool.protocol import wire
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.types import BlockRun, check_hash
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.authentication import Context, Who
from kvpool_server.access.caller import CALLER, is_visible
from kvpool_server.cache.fair_slots import FairSlots
from kvpool_server.cache.leases import Owner
from kvpool_server.cache.namespaces import unknown_namespace
from kvpool_server.data_plane.permits import PermitTable
from kvpool_server.observability.metrics import RpcMetrics
from kvpool_server.reports.engines import EngineReports
from kvpool_server.reports.usage_ledger import UsageLedger
from kvpool_server.rpc.drain import Drain
from kvpool_server.rpc.inbox import Inbox
from kvpool_server.rpc.lookup_streams import LookupStreams
from kvpool_server.rpc.turns import Turns
from kvpool_server.rpc.verifier import Verifier
from kvpool_server.tiering.tiered_pool import TieredPool


@dataclass(kw_only=True, eq=False)
class Handlers:
    """The parts of one server that its RPCs use. Each RPC is the method of its name in a subclass.

    Args:
        tiered: the pool above its tiers.
        memory: the arena, uint8 [arena_bytes].
        boot_token: in each reply; it names this start of the server.
        metrics: counts bytes, and the lookups of streams.
        offer: the transports to and from the arena.
        value: what other arena sizes would hit, of a tenant or of all.
        ledger: what tenants have used and saved; None: the server keeps none.
        permits: of the data port; None: the server has no data port.
        who: authenticates callers; None: callers are not authenticated.
        tracing: gets a span for each call; None: calls are not traced.

    Attributes:
        pool: without its tiers.
        ledger_turns: of the callers that read the ledger.
    """

    tiered: TieredPool
    memory: npt.NDArray[np.uint8]
    boot_token: int
    drain: Drain
    turns: Turns
    metrics: RpcMetrics
    offer: pb.PingResponse
    stats: Callable[[], pb.StatsResponse]
    reports: EngineReports
    value: Callable[[str | None], pb.ValueResponse]
    ledger: UsageLedger | None = None
    permits: PermitTable | None = None
    who: Who | None = None
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        self.pool = self.tiered.pool
        self.streams = LookupStreams(self.pool.limits.max_streams)
        self.run = self.turns.run
        self.inbox = Inbox()
        self.verifier = Verifier(self.pool, self.memory, self.run)
        self.ledger_turns = FairSlots(1, 1)

    def fingerprint(self, name: bytes) -> bytes:
        """The fingerprint of a request's namespace. Raises as `check_visible`."""
        check_hash(name, "namespace")
        self.check_visible(name)
        return name

    def check_visible(self, fingerprint: bytes) -> None:
        """Raises UnknownNamespaceError for a namespace of another tenant, with the message of one that is not open."""
        namespace = self.pool.namespace(fingerprint)
        if not is_visible(namespace.spec.tenant if namespace is not None else None):
            raise unknown_namespace(fingerprint)

    def runs(self, runs: Sequence[pb.BlockRun], max_blocks: int = 0) -> list[BlockRun]:
        """The runs of a request, of `max_batch_blocks` blocks at most by default. Raises InvalidRequestError."""
        most = self.pool.limits.max_runs
        if len(runs) > most:
            raise InvalidRequestError(f"{len(runs)} runs in one message; give at most {most}, and split larger ones")
        return wire.decode_runs(runs, max_blocks or self.pool.limits.max_batch_blocks)

    def check_count(self, count: int, what: str) -> None:
        """Raises InvalidRequestError if a request names more things than `max_batch_blocks`."""
        most = self.pool.limits.max_batch_blocks
        if count > most:
            raise InvalidRequestError(f"{count} {what} in one message; give at most {most}, and split larger ones")


def owner_of(context: Context) -> Owner:
    """The owner of a call's leases and tickets: its caller or, where callers are not authenticated, its connection."""
    caller = CALLER.get()
    return Owner(context.peer()) if caller is None else Owner(str(caller), caller.tenant)
