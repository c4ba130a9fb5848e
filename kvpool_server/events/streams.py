"""All streams of KV events of a server: one about all tenants' blocks, and one for each tenant that is to have its own.

Each stream has its own endpoints, numbers, snapshots and thread. A tenant's subscribers can therefore neither see nor
delay what other tenants' subscribers get, nor conclude from gaps how much others store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from kvpool.security.principal import ALL_TENANTS
from kvpool_server.cache.entry import Entry, Observer
from kvpool_server.events.encoder import Encoder
from kvpool_server.events.gate import Gate
from kvpool_server.events.history import History
from kvpool_server.events.ledger import Ledger
from kvpool_server.events.publisher import Publisher

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StreamEndpoints:
    """The endpoints of one stream.

    Args:
        tenant: whose blocks; `ALL_TENANTS` for everybody's.
        endpoint: where subscribers connect: tcp://HOST:PORT or ipc://PATH.
        replay_endpoint: where they ask for messages that they missed; empty: nowhere.
    """

    tenant: str
    endpoint: str
    replay_endpoint: str = ""


class EventStreams(Observer):
    """See the module. Raises ConfigError if an address cannot be listened on; nothing is left behind then.

    Args:
        endpoints: of each stream, each tenant once.
        gate: admits subscribers; None: whoever connects is admitted.
        max_batches: messages that each stream keeps for replays.
        defer: as `Ledger` takes it.
    """

    def __init__(
        self,
        endpoints: Sequence[StreamEndpoints],
        gate: Gate | None,
        encoder: Encoder,
        counters: dict[str, int],
        max_batches: int,
        defer: Callable[[Callable[[], None]], object],
    ):
        self._ledgers: dict[str, Ledger] = {}
        self._publishers: list[Publisher] = []
        counting = threading.Lock()
        try:
            for each in endpoints:
                ledger = Ledger(defer, counters)
                history = History(ledger, encoder, counters, max_batches, counting)
                publisher = Publisher(ledger, history, each.endpoint, each.replay_endpoint, gate, each.tenant)
                self._publishers.append(publisher)
                self._ledgers[each.tenant] = ledger
                log.info(
                    "publishing KV events", endpoint=publisher.endpoint, replay=publisher.replay_endpoint or None,
                    tenant=None if each.tenant == ALL_TENANTS else each.tenant, curve=gate is not None,
                )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def stored(self, entry: Entry) -> None:
        for ledger in self._ledgers_of(entry):
            ledger.stored(entry)

    def removed(self, entry: Entry) -> None:
        for ledger in self._ledgers_of(entry):
            ledger.removed(entry)

    def _ledgers_of(self, entry: Entry) -> list[Ledger]:
        tenants = {ALL_TENANTS, entry.group.declared_tenant}
        return [self._ledgers[tenant] for tenant in tenants if tenant in self._ledgers]

    def withdraw(self) -> None:
        """Tells every subscriber that the server holds nothing any more, and nothing from then on. Idempotent."""
        for publisher in self._publishers:
            publisher.ledger.withdraw()

    def close(self) -> None:
        """Publishes the remaining changes, and ends the threads. Idempotent."""
        for publisher in self._publishers:
            publisher.close()
