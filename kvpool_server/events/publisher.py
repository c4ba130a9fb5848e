"""The streams of KV events: one about all tenants' blocks, and one for each tenant that is to have its own.

Each stream puts messages on a PUB socket and answers replay requests on a ROUTER socket, both as vLLM's publisher does.
A thread owns the sockets and waits for no subscriber: a PUB socket drops messages that a slow subscriber does not
receive, and a replay continues whenever its client has received some of it, until it is done or stalls for too long.

Each stream has its own endpoints, numbers, snapshots and thread. A tenant's subscribers can therefore neither see nor
delay what other tenants' subscribers get, nor conclude from gaps how much others store.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import structlog
import zmq

from kvpool.security.principal import ALL_TENANTS
from kvpool_server.cache.entry import Entry, Observer
from kvpool_server.events.ledger import Ledger, SnapshotLostError
from kvpool_server.events.messages import Encoder, History, Message
from kvpool_server.events.sockets import Gate, Sockets

log = structlog.get_logger()

_END = Message(b"", (1 << 64) - 1, b"")
_END_SEQ = _END.seq.to_bytes(8, "big")
MAX_REPLAYS = 16
SNAPSHOT_EVERY_S = 10.0
"""From the beginning of one snapshot for a client, or for a key where clients have keys, to that of the next."""
REPLAY_S = 120.0
"""How long one replay may take."""
MAX_ASKERS = 1_024
"""Clients or keys whose last snapshot is remembered."""
REPLAY_STALL_S = 10.0
POLL_MS = 1_000
POLL_REPLAYS_MS = 5
LINGER_MS = 200
MESSAGES_A_TURN = 64


@dataclass(slots=True)
class _Replay:
    """An answer under way.

    Args:
        client: the ROUTER's name of the connection.
        asker: the client's key; the connection where clients have none.
        is_new_snapshot: a snapshot of which nothing has been sent.
    """

    client: bytes
    asker: bytes
    messages: Iterator[Message | None]
    is_new_snapshot: bool
    begins_at: float
    stalls_at: float
    unsent: list[bytes] | None = None


class Publisher:
    """Publishes one stream of KV events from a thread of its own, and answers requests for replays.

    The endpoints and keys are those of `Sockets`. Raises ConfigError for endpoints that cannot be used.
    """

    def __init__(
        self,
        ledger: Ledger,
        history: History,
        endpoint: str,
        replay_endpoint: str,
        gate: Gate | None = None,
        tenant: str = ALL_TENANTS,
    ):
        self._ledger = ledger
        self._history = history
        self._gate = gate
        self._tenant = tenant
        self._is_stopping = False
        self._replays: list[_Replay] = []
        self._snapshot_at: dict[bytes, float] = {}
        self._version = -1
        self._admitted: frozenset[bytes] = frozenset()
        self._sockets = Sockets(endpoint, replay_endpoint, gate, tenant)
        self.endpoint, self.replay_endpoint = self._sockets.endpoint, self._sockets.replay_endpoint
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        ledger.wake = self._wake
        self._wake()
        self._thread = threading.Thread(target=self._run, name="kvpool-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publishes the remaining changes, and ends the thread. Idempotent."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._wake()
        self._thread.join()
        self._ledger.wake = lambda: None
        self._sockets.close(LINGER_MS)
        os.close(self._wake_fd)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._end_connections_of_removed_keys()
                self._poll(self._sockets.router)
                self._turn(self._sockets.router)
            except Exception:
                log.exception("publishing KV events failed")  # Subscribers see a gap; the next turn may succeed.
                time.sleep(0.1)
        self._publish()

    def _end_connections_of_removed_keys(self) -> None:
        """Ends all connections if a key was taken from the list: ZeroMQ cannot end one alone.

        Subscribers whose keys are still listed connect again by themselves, see a gap, and ask for a replay.
        """
        if self._gate is None or (version := self._gate.look()) == self._version:
            return
        admitted = self._gate.admitted(self._tenant)
        if self._admitted - admitted:
            self._replays = []
            self._sockets.reopen()
            log.info("ended the connections to KV events: a key is not listed any more", tenant=self._tenant)
        self._version, self._admitted = version, admitted

    def _poll(self, router: zmq.Socket[bytes] | None) -> None:
        """Waits for changes, requests, or the next turn of replays."""
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if router is not None and len(self._replays) < MAX_REPLAYS:
            poller.register(router, zmq.POLLIN)
        wait_ms = POLL_REPLAYS_MS if self._ledger.catch_up() or self._replays else POLL_MS
        poller.poll(wait_ms)

    def _turn(self, router: zmq.Socket[bytes] | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        self._publish()
        if router is not None:
            self._receive(router)
            self._replays = [replay for replay in self._replays if self._continue(router, replay)]

    def _publish(self) -> None:
        for message in self._history.publish():
            self._sockets.pub.send_multipart(message.frames)

    def _receive(self, router: zmq.Socket[bytes]) -> None:
        while len(self._replays) < MAX_REPLAYS:
            try:
                frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning(
                    "ignored a replay request: it must be an empty frame and 8 bytes", sizes=list(map(len, frames[1:]))
                )
                continue
            client, start_seq = frames[0].bytes, int.from_bytes(frames[2].bytes, "big")
            asker = client if self._gate is None else str(frames[0].get("User-Id")).encode()
            begins_at, is_snapshot = time.monotonic(), self._history.needs_snapshot(start_seq)
            if is_snapshot:
                begins_at = max(begins_at, self._snapshot_at.get(asker, -math.inf) + SNAPSHOT_EVERY_S)
            # A client that asks again has given up on its previous replay: each client has one at most. A key has one
            # snapshot that waits, at most: a client that connected again asks by another name.
            self._replays = [
                replay
                for replay in self._replays
                if replay.client != client and not (is_snapshot and replay.is_new_snapshot and replay.asker == asker)
            ]
            answer, stalls_at = self._history.answer(start_seq), begins_at + REPLAY_STALL_S
            self._replays.append(_Replay(client, asker, answer, is_snapshot, begins_at, stalls_at))

    def _remember_snapshot(self, asker: bytes, now: float) -> None:
        self._snapshot_at.pop(asker, None)
        self._snapshot_at[asker] = now
        if len(self._snapshot_at) > MAX_ASKERS:
            del self._snapshot_at[next(iter(self._snapshot_at))]

    def _continue(self, router: zmq.Socket[bytes], replay: _Replay) -> bool:
        """Sends what the client receives, MESSAGES_A_TURN at most: others wait meanwhile. False if it has ended."""
        now = time.monotonic()
        if now < replay.begins_at:
            return True
        if now > replay.begins_at + REPLAY_S:
            return False
        for _ in range(MESSAGES_A_TURN):
            time.sleep(0)  # The pool's loop takes the interpreter's lock before the next message is encoded.
            frames = replay.unsent
            if frames is None:
                try:
                    message = next(replay.messages, _END)
                except SnapshotLostError as error:
                    log.warning("gave up a snapshot of the KV events", reason=str(error))
                    return False
                if message is None:  # The answer is not ready yet.
                    return True
                frames = [replay.client, b"", *message.frames]
            try:
                router.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                replay.unsent = frames
                return time.monotonic() <= replay.stalls_at
            except zmq.ZMQError:  # The client is gone.
                return False
            if replay.is_new_snapshot:
                # A snapshot whose client has gone away before its first message does not delay the key's next snapshot.
                replay.is_new_snapshot = False
                self._remember_snapshot(replay.asker, now)
            replay.unsent = None
            replay.stalls_at = time.monotonic() + REPLAY_STALL_S
            if frames[3] == _END_SEQ:
                return False
        return True


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
    """All streams of a server. Raises ConfigError if an address cannot be listened on; nothing is left behind then.

    Args:
        endpoints: of each stream, each tenant once.
        gate, max_batches, defer: as `Sockets`, `History` and `Ledger` take them.
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
        try:
            for each in endpoints:
                ledger = Ledger(defer, counters)
                history = History(ledger, encoder, counters, max_batches)
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

    def stored(self, entries: Sequence[Entry]) -> None:
        for ledger in self._ledgers_of(entries[0]):
            ledger.stored(entries)

    def removed(self, entry: Entry) -> None:
        for ledger in self._ledgers_of(entry):
            ledger.removed(entry)

    def _ledgers_of(self, entry: Entry) -> list[Ledger]:
        tenants = {ALL_TENANTS, entry.group.declared_tenant}
        return [self._ledgers[tenant] for tenant in tenants if tenant in self._ledgers]

    def withdraw(self) -> None:
        """Tells every subscriber that the server holds nothing any more, and nothing from then on. Idempotent."""
        for ledger in self._ledgers.values():
            ledger.withdraw()

    def close(self) -> None:
        """Publishes the remaining changes, and ends the threads. Idempotent."""
        for publisher in self._publishers:
            publisher.close()
