"""The client of an inference engine: lookups that nobody waits for, and control over the connection's parts."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.client import Client
from kvpool.rpc import Namespace, PendingLookup
from kvpool.transport.choice import Choice
from kvpool.types import BlockRun


class EngineClient(Client):
    """A `Client` for threads that must not wait, and for servers that come and go."""

    def lookup_async(
        self,
        namespace: Namespace,
        runs: Sequence[BlockRun],
        *,
        prefix_only: bool = True,
        lease: bool = True,
        timeout_ms: int | None = None,
    ) -> PendingLookup:
        """As `lookup`, without waiting. Another thread encodes `runs`: do not change them."""
        return self.rpc.lookup_async(namespace, runs, prefix_only=prefix_only, lease=lease, timeout_ms=timeout_ms)

    def release_quietly(self, *lease_ids: int) -> None:
        """As `release`, without waiting. If the call is lost, the leases expire. Ids of 0 are skipped."""
        self.rpc.release_quietly(*lease_ids)

    def check(self, namespace: Namespace) -> int:
        """Asks the server whether a namespace is still valid.

        Returns:
            How many namespaces were opened on the server since its start; 0 from an older server.

        Raises:
            UnavailableError: the server cannot be reached, or has restarted since the namespace was opened.
        """
        reply = self.rpc.ping()
        self.rpc.check_boot(namespace, reply.boot_token)
        return int(reply.namespaces_opened)

    @property
    def choice(self) -> Choice | None:
        """The transport in use, and why; None while no namespace is open."""
        return self._attachment.choice

    def detach(self) -> None:
        """Unmaps the memory of a server that is gone. Namespaces opened before become invalid."""
        self._attachment.detach()
