"""Subscribers of KV events that rebuild which blocks a pool holds."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from kvpool.client.events import EventMessage, Subscriber
from kvpool.security.curve import SubscriberKeys
from kvpool_server.events.messages import Message
from tests.support.processes import run_command

Known = tuple[str, int | None, int | bytes]
"""(namespace, group_idx, block's name)"""


def low_64_bits(block_hash: bytes) -> int:
    return int.from_bytes(block_hash, "big") & ((1 << 64) - 1)


def decoded(message: Message) -> EventMessage:
    ts, events, rank = msgspec.msgpack.decode(message.payload)
    assert rank == 0
    return EventMessage(message.topic.decode(), message.seq, ts, events)


class View:
    """Which blocks the events heard so far add up to. An event that makes no sense is an AssertionError.

    Attributes:
        seq: of the last message.
    """

    def __init__(self) -> None:
        self.seq = -1
        self.blocks: set[Known] = set()

    def apply(self, message: EventMessage) -> None:
        namespace = message.topic.partition("@")[2]
        for event in message.events:
            self._apply(namespace, event)
        self.seq = message.seq

    def _apply(self, namespace: str, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            assert namespace == "@", "a clearing event is about all namespaces"
            self.blocks.clear()
            return
        named = {(namespace, event.get("group_idx"), name) for name in event["block_hashes"]}
        assert len(named) == len(event["block_hashes"]) > 0
        if event["type"] == "BlockStored":
            assert not named & self.blocks, "a block is stored twice"
            self.blocks |= named
        else:
            assert event["type"] == "BlockRemoved"
            assert named <= self.blocks, "a block is removed that was not there"
            self.blocks -= named


def follow(num_messages: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that follows events until it prints so many messages: a second is enough, or not if it is busy."""
    for seconds in (1, 5, 25):
        done = run_command(*command, "--seconds", f"{seconds}")
        if done.stdout.count("\n") >= num_messages:
            break
    return done


class Listener:
    """A view that follows a real server.

    Args:
        endpoint, replay_endpoint, keys: as `Subscriber` takes them.
    """

    def __init__(self, endpoint: str, replay_endpoint: str = "", keys: SubscriberKeys | None = None):
        self.subscriber = Subscriber(endpoint, replay_endpoint, keys=keys)
        self.view = View()
        self.messages: list[EventMessage] = []

    def listen(self, timeout_ms: int = 50) -> None:
        for message in self.subscriber.receive(timeout_ms):
            self.messages.append(message)
            self.view.apply(message)

    def wait_for(self, blocks: Iterable[Known], deadline_s: float = 30.0) -> None:
        """Listens until the view is just these blocks."""
        wanted, ends_at = set(blocks), time.monotonic() + deadline_s
        while self.view.blocks != wanted:
            assert time.monotonic() < ends_at, f"the view is {self.view.blocks}, not {wanted}"
            self.listen()

    def close(self) -> None:
        self.subscriber.close()
