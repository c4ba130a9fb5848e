"""All streams of KV events of a server: one about all tenants' blocks, one for each tenant that is to have its own, and
one of usable prefixes for each model that routers are to be told of.

Each stream has its own endpoints, numbers, snapshots and thread. A tenant's subscribers can therefore neither see nor
delay what other tenants' subscribers get, nor conclude from gaps how much others store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from kvpool.namespace import NamespaceSpec
from kvpool.principal import ALL_TENANTS
from kvpool.types import BlockRun
from kvpool_server.cache.entry import Entry, Observer
from kvpool_server.events.encoder import Encoder
from kvpool_server.events.gate import Gate
from kvpool_server.events.history import History
from kvpool_server.events.ledger import Ledger
from kvpool_server.events.prefix_encoder import PrefixEncoder
from kvpool_server.events.prefixes import PrefixView
from kvpool_server.events.publisher import SNAPSHOT_EVERY_S, Publisher

log = structlog.get_logger()

BEAT_S = 1.0
"""Routers ask for what they missed only when a message shows a gap, so a stream for them is never silent for longer."""
REPLAYED_SNAPSHOT_EVERY_S = 0.5
"""Dynamo's indexer waits for a replay for less than a second, and counts what has not come by then as lost."""
PREFIX_BATCH_BLOCKS = 128
"""Fewer than of other streams: each block has its tokens."""


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


@dataclass(frozen=True, slots=True)
class PrefixEndpoints:
    """The endpoints of a stream of one model's usable prefixes, for routers.

    Args:
        name: what routers call this server: the second part of the topic.
        model, tenant: of the namespaces.
        endpoint: as of `StreamEndpoints`.
        replay_endpoint: as of `StreamEndpoints`; empty: each new subscription gets a snapshot in the stream itself.
    """

    name: str
    model: str
    endpoint: str
    replay_endpoint: str = ""
    tenant: str = ""


class EventStreams(Observer):
    """See the module. Raises ConfigError if an address cannot be listened on; nothing is left behind then.

    Args:
        endpoints: of each stream, each tenant once.
        gate: admits subscribers; None: whoever connects is admitted.
        max_batches: messages that each stream keeps for replays.
        defer: as `Ledger` takes it.
        prefixes: endpoints of the streams of prefixes.
        spec_of: as `PrefixView` takes it.
    """

    def __init__(
        self,
        endpoints: Sequence[StreamEndpoints],
        gate: Gate | None,
        encoder: Encoder,
        counters: dict[str, int],
        max_batches: int,
        defer: Callable[[Callable[[], None]], object],
        prefixes: Sequence[PrefixEndpoints] = (),
        spec_of: Callable[[bytes], NamespaceSpec | None] = lambda _: None,
    ):
        self._views: list[PrefixView] = []
        self._ledgers: dict[str, Ledger] = {}
        self._ledger_of_all: Ledger | None = None
        self._publishers: list[Publisher] = []
        counting = threading.Lock()
        try:
            for each in endpoints:
                ledger = Ledger(defer, counters)
                history = History(ledger, encoder, counters, max_batches, counting)
                publisher = Publisher(ledger, history, each.endpoint, each.replay_endpoint, gate, each.tenant)
                self._publishers.append(publisher)
                if each.tenant == ALL_TENANTS:
                    self._ledger_of_all = ledger
                else:
                    self._ledgers[each.tenant] = ledger
                log.info(
                    "publishing KV events", endpoint=publisher.endpoint, replay=publisher.replay_endpoint or None,
                    tenant=None if each.tenant == ALL_TENANTS else each.tenant, curve=gate is not None,
                )  # fmt: skip
            for stream in prefixes:
                ledger = Ledger(defer, counters, batch_blocks=PREFIX_BATCH_BLOCKS)
                encode = PrefixEncoder(stream.name, stream.model, *encoder.settings)
                can_ask = bool(stream.replay_endpoint)
                history = History(ledger, encode, counters, max_batches if can_ask else 0, counting)
                publisher = Publisher(
                    ledger, history, stream.endpoint, stream.replay_endpoint, gate, stream.tenant or ALL_TENANTS,
                    BEAT_S, REPLAYED_SNAPSHOT_EVERY_S if can_ask else SNAPSHOT_EVERY_S, snapshots_in_stream=not can_ask,
                )  # fmt: skip
                self._publishers.append(publisher)
                self._views.append(PrefixView(stream.model, stream.tenant, ledger, spec_of, defer))
                log.info(
                    "publishing prefixes for routers", endpoint=publisher.endpoint,
                    replay=publisher.replay_endpoint or None,
                    name=stream.name, model=stream.model, tenant=stream.tenant or None, curve=gate is not None,
                )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def wants_tokens(self, spec: NamespaceSpec) -> bool:
        """Whether a stream may publish blocks of a namespace, once engines have announced their tokens."""
        return any(view.follows(spec) for view in self._views)

    def announced(self, fingerprint: bytes, run: BlockRun, token_ids: Sequence[int]) -> None:
        """An engine has told which tokens blocks stand for. Raises InvalidRequestError for a wrong number of tokens."""
        for view in self._views:
            view.announced(fingerprint, run, token_ids)

    def stored(self, entry: Entry) -> None:
        for ledger in (self._ledger_of_all, self._ledgers.get(entry.group.declared_tenant)):
            if ledger is not None:
                ledger.stored(entry)
        for view in self._views:
            view.stored(entry)

    def removed(self, entry: Entry) -> None:
        for ledger in (self._ledger_of_all, self._ledgers.get(entry.group.declared_tenant)):
            if ledger is not None:
                ledger.removed(entry)
        for view in self._views:
            view.removed(entry)

    def withdraw(self) -> None:
        """Tells every subscriber that the server holds nothing any more, and nothing from then on. Idempotent."""
        for publisher in self._publishers:
            publisher.ledger.withdraw()

    def close(self) -> None:
        """Publishes the remaining changes, and ends the threads. Idempotent."""
        for publisher in self._publishers:
            publisher.close()
