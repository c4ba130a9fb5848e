"""Operators' calls: what a server holds, bounds on it, and removal. `kvpool` (the command) is made of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvpool import replies, wire
from kvpool.drain import DrainProgress
from kvpool.explanation import Explanation
from kvpool.explanation_messages import explanation
from kvpool.holdings import NamespaceInfo
from kvpool.ledger import LedgerPage, LedgerRow
from kvpool.rpc import Namespace, PoolRpc
from kvpool.skew import Release
from kvpool.transport.choice import Choice, choose
from kvpool.types import BlockRun, HintKind, HintResult, PinBudget, PoolStats, Quota, WhoAmI
from kvpool.v1 import pool_pb2 as pb
from kvpool.value import ValueReport

MAX_ROWS = 100_000
"""Of a ledger, over all of its parts: more than a server keeps."""


class Admin:
    """Operators' calls, on a client's connection. Thread-safe.

    Raises (every method): UnavailableError, PoolTimeoutError, InvalidReplyError, and what its docstring names.
    """

    def __init__(self, rpc: PoolRpc):
        self._rpc = rpc

    def ping(self) -> tuple[str, float]:
        """The server's version, and the seconds since its start."""
        return replies.ping(self._rpc.ping())

    def release(self) -> tuple[Release, float]:
        """The server's release, and the seconds since its start."""
        reply = self._rpc.ping()
        version, uptime_s = replies.ping(reply)
        return Release(version, reply.protocol), uptime_s

    def whoami(self) -> WhoAmI:
        """Who the server takes this client for."""
        return replies.whoami(self._rpc.call(self._rpc.stub.WhoAmI, pb.WhoAmIRequest()))

    def try_transport(self) -> Choice:
        """Attaches to the server as `Client.open_namespace` does, and raises as it. Close the choice's transport."""
        return choose(self._rpc.config, replies.offer(self._rpc.ping()), self._rpc.channel)

    def stats(self) -> PoolStats:
        """What the pool holds, and its counters."""
        return replies.stats(self._rpc.call(self._rpc.stub.Stats, pb.StatsRequest()))

    def namespaces(self, *, holdings: bool = True) -> list[NamespaceInfo]:
        """Every open namespace, in the order of their opening.

        Args:
            holdings: False omits what each one holds, for which the server would visit every entry.
        """
        request = pb.ListNamespacesRequest(without_holdings=not holdings)
        reply = self._rpc.call(self._rpc.stub.ListNamespaces, request)
        return replies.namespaces(reply)

    def value(self) -> ValueReport:
        """What smaller and larger arenas would hit: of the caller's tenant, or of all for an operator."""
        return replies.value(self._rpc.call(self._rpc.stub.Value, pb.ValueRequest()))

    def quotas(self) -> list[Quota]:
        """Every quota, by subject."""
        return replies.quotas(self._rpc.call(self._rpc.stub.ListQuotas, pb.ListQuotasRequest()).quotas)

    def pin_budgets(self) -> list[PinBudget]:
        """What each tenant with open namespaces may pin, and has pinned; none from a server of an older release."""
        return replies.pin_budgets(self._rpc.call(self._rpc.stub.ListQuotas, pb.ListQuotasRequest()).pin_budgets)

    def set_quotas(self, quotas: Sequence[Quota]) -> list[Quota]:
        """Sets quotas, and deletes those of 0 bytes; returns all quotas after that.

        Blocks beyond a subject's new quota are evicted at once, except leased ones and those being written.

        Raises InvalidRequestError if one of the quotas is invalid; none is set.
        """
        request = pb.SetQuotasRequest(quotas=wire.encode_quotas(quotas))
        return replies.quotas(self._rpc.call(self._rpc.stub.SetQuotas, request).quotas)

    def ledger(self, since: int, until: int = 0) -> LedgerPage:
        """The ledger of hours that end after `since` and begin before `until`, in Unix time; 0: now.

        The server answers in parts; the returned page has the rows of all parts.
        """
        rows: list[LedgerRow] = []
        while True:
            request = pb.LedgerRequest(since=since, until=until)
            page = replies.ledger(self._rpc.call(self._rpc.stub.Ledger, request))
            rows += page.rows
            if page.next_since <= since or len(rows) > MAX_ROWS:
                return replace(page, rows=tuple(rows), next_since=0)
            since = page.next_since

    def explain(self, fingerprint: bytes, runs: Sequence[BlockRun], *, timeout_ms: int | None = None) -> Explanation:
        """What the server knows of a prompt's blocks, given under their names on the wire: see `PoolRpc.name_of`.

        Args:
            runs: of a namespace, one a group.

        Raises UnknownNamespaceError, InvalidRequestError.
        """
        request = pb.ExplainRequest(namespace=fingerprint, runs=wire.encode_runs(runs))
        return explanation(self._rpc.call(self._rpc.stub.Explain, request, timeout_ms), runs)

    def drain(self, deadline_ms: int = 0, boot_token: int = 0) -> DrainProgress:
        """Takes the server out of service, and says how far the drain is; further calls say it again.

        The server refuses new leases and tickets from now on, lets the live ones end, writes what its tiers lack, and
        stops.

        Args:
            deadline_ms: until the server stops, whatever is unfinished then, at most `MAX_DRAIN_MS`; 0: the server's
                drain_ms. Of several calls the earliest deadline counts.
            boot_token: of the server that drains: further calls must not drain its successor. 0: of any.

        Raises InvalidRequestError, and UnavailableError from a server with another boot token.
        """
        request = pb.DrainRequest(deadline_ms=deadline_ms, boot_token=boot_token)
        return replies.drain(self._rpc.call(self._rpc.stub.Drain, request))

    def is_draining(self) -> bool:
        """Whether the server refuses new leases and tickets, and stops soon."""
        return bool(self._rpc.ping().draining)

    def hint(
        self,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        kind: HintKind,
        *,
        pin_seconds: int = 0,
        timeout_ms: int | None = None,
    ) -> HintResult:
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
        checked = replies.count("num_checked", reply.num_checked, sum(map(len, runs)))
        return checked, replies.count("num_dropped", reply.num_dropped, checked)
