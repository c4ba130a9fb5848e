"""A stream for subscribers that cannot ask for what they missed: each new subscription gets a snapshot in the stream.

A snapshot is a part of the stream, with the stream's next numbers: it clears, all blocks follow, and then the changes
that have come since it began. So whoever receives it from its beginning on has what the ledger has. It goes to all
subscribers, and those that have subscribed since the last one began share it. A subscription that comes while it is
sent gets the next one.

A gap in the numbers has the next snapshot sent, too: the ledger has dropped batches, or a snapshot was given up.

Messages wait while a subscriber has no room for them, since a snapshot is larger than what ZeroMQ queues. A subscriber
that takes too long loses messages: ZeroMQ leaves it out until it has received some of those before, and tells nobody
when that is. So several later snapshots make up for what it has lost.

Not thread-safe: the publisher's thread owns the stream.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import structlog
import zmq

from kvpool_server.events.history import History, Message
from kvpool_server.events.ledger import Ledger, SnapshotLostError

log = structlog.get_logger()

PATIENCE_S = 120.0
"""So long the stream waits for slow subscribers in all, until it has sent what there is."""
MAKE_UP_EVERY_S = 120.0
"""After a loss."""
MAKE_UPS = 5
STALL_S = 10.0
"""The stream waits for a subscriber that takes nothing for so long."""
MESSAGES_A_TURN = 64
MAX_RECEIVED = 10_000
"""Messages of subscribers that are received in one turn."""
POLL_MS = 1_000
POLL_SOON_MS = 5
"""While a subscriber has no room, or changes wait to be applied."""
_SUBSCRIBED = b"\1"


class LiveStream:
    """See the module.

    Args:
        every_s: from the beginning of one snapshot to that of the next, at least.

    Attributes:
        wait_ms: the next turn is due after so long, or as soon as the ledger wakes or a subscriber sends something.
    """

    def __init__(self, ledger: Ledger, history: History, every_s: float, clock: Callable[[], float] = time.monotonic):
        self.wait_ms = 0
        self._ledger = ledger
        self._history = history
        self._every_s = every_s
        self._clock = clock
        self._is_wanted = False  # Whether somebody needs a snapshot.
        self._begun_at = -math.inf  # The last snapshot.
        self._make_up_at = math.inf
        self._num_make_ups = 0  # That are to come.
        self._next_seq: int | None = None
        self._unsent: Message | None = None
        self._stalled_at = math.inf
        self._behind_since = math.inf  # A subscriber had no room first, and not all has been sent since.
        self._is_finishing = False
        self._messages = self._all_messages()

    @property
    def is_behind(self) -> bool:
        """Whether there is something to send now."""
        return self._unsent is not None

    def turn(self, pub: zmq.Socket[bytes]) -> bool:
        """Receives subscriptions, and sends MESSAGES_A_TURN at most. Returns whether a message was sent."""
        self._receive(pub)
        has_sent = False
        for _ in range(MESSAGES_A_TURN):
            time.sleep(0)  # The pool's loop takes the interpreter's lock before the next message is encoded.
            if not self._prepare():
                self._behind_since = math.inf
                due_ms = (self._due_at - self._clock()) * 1_000
                self.wait_ms = math.ceil(min(max(due_ms, POLL_SOON_MS), POLL_MS))
                return has_sent
            if not self._send(pub):
                self.wait_ms = POLL_SOON_MS
                return has_sent
            has_sent = True
        self.wait_ms = 0
        return has_sent

    def finish(self, pub: zmq.Socket[bytes]) -> None:
        """Sends the remaining changes, and waits for nobody. A snapshot that is being sent is given up."""
        self._is_finishing = True
        while self._prepare():
            self._send(pub)

    def _receive(self, pub: zmq.Socket[bytes]) -> None:
        for _ in range(MAX_RECEIVED):
            try:
                received = pub.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._is_wanted |= received[:1] == _SUBSCRIBED

    @property
    def _due_at(self) -> float:
        """When the next snapshot begins; infinite if nobody needs one."""
        return max(-math.inf if self._is_wanted else self._make_up_at, self._begun_at + self._every_s)

    def _prepare(self) -> bool:
        """Makes the next message the unsent one; False if there is none now."""
        if self._unsent is None:
            try:
                self._unsent = next(self._messages)
            except Exception:
                self._messages = self._all_messages()  # What the old ones still had shows as a gap.
                raise
        return self._unsent is not None

    def _all_messages(self) -> Iterator[Message | None]:
        """For ever. None: there is none now."""
        while True:
            yield from self._checked(self._history.publish())
            if self._is_finishing or self._clock() < self._due_at or self._ledger.catch_up():
                yield None
                continue
            self._begin()
            try:
                for message in self._history.publish_snapshot():
                    if self._is_finishing:
                        break
                    self._next_seq = message.seq + 1
                    yield message
            except SnapshotLostError as error:
                self._is_wanted = True
                log.warning("gave up a snapshot in a stream of KV events, and will send another", reason=str(error))

    def _begin(self) -> None:
        self._begun_at, self._is_wanted = self._clock(), False
        if self._begun_at >= self._make_up_at:
            self._num_make_ups -= 1
            self._make_up_at = self._begun_at + MAKE_UP_EVERY_S if self._num_make_ups else math.inf

    def _checked(self, messages: Iterator[Message]) -> Iterator[Message]:
        for message in messages:
            self._is_wanted |= self._next_seq not in (None, message.seq)
            self._next_seq = message.seq + 1
            yield message

    def _send(self, pub: zmq.Socket[bytes]) -> bool:
        """Sends the unsent message; False if a subscriber has no room for it and is to be waited for."""
        assert self._unsent is not None, "a message is prepared before it is sent"
        try:
            pub.send_multipart(self._unsent.frames, zmq.NOBLOCK)
        except zmq.Again:
            now = self._clock()
            self._stalled_at, self._behind_since = min(self._stalled_at, now), min(self._behind_since, now)
            if not self._is_finishing and now < min(self._stalled_at + STALL_S, self._behind_since + PATIENCE_S):
                return False
            log.warning("a subscriber to KV events receives too slowly, and loses messages", topic=self._unsent.topic)
            self._make_up_at, self._num_make_ups = now + MAKE_UP_EVERY_S, MAKE_UPS
            pub.setsockopt(zmq.XPUB_NODROP, 0)  # Subscribers without room are left out until they have some again.
            pub.send_multipart(self._unsent.frames)
            pub.setsockopt(zmq.XPUB_NODROP, 1)
        self._unsent, self._stalled_at = None, math.inf
        return True
