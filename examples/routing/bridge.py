"""Publishes the KV events of a kvpool server with the tokens of the blocks, for routers that index blocks by tokens.

The server's events name blocks by hash alone; the events of vLLM's engines say which tokens a hash stands for. A block
that the server holds is published once its tokens are known and the block before it is published.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvpool import PoolTimeoutError, Subscriber, SubscriberKeys
from kvpool_server.events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

MAX_IDLE = 1 << 20  # Blocks that the server does not hold and whose tokens are remembered.
MESSAGE_EVENTS = 1_024
Name = int | bytes


class Prefixes:
    """The blocks to publish; `events` are to be sent next. Each block is published after the block before it."""

    def __init__(self) -> None:
        self.events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._medium = "CPU"  # Where the server says that its blocks lie.
        self._blocks: dict[Name, tuple[Name | None, list[int]]] = {}  # The block before, and the tokens.
        self._children: dict[Name | None, set[Name]] = {}
        self._idle: dict[Name, None] = {}  # Blocks that the server does not hold, the oldest first.
        self._held: set[Name] = set()
        self._published: dict[Name, BlockStored] = {}

    def learn(self, event: dict[str, Any]) -> None:
        """Remembers the tokens of an engine's blocks, unless their hashes fold in more than tokens."""
        tokens, parent = event.get("token_ids"), event.get("parent_block_hash")
        if not tokens or event.get("lora_name") or event.get("group_idx") or any(event.get("extra_keys") or ()):
            return
        for nth, name in enumerate(event["block_hashes"]):
            if name not in self._blocks:
                self._blocks[name] = parent, tokens[nth * event["block_size"] :][: event["block_size"]]
                self._children.setdefault(parent, set()).add(name)
                self._rest(name) if name not in self._held else self._publish(name)
            parent = name

    def follow(self, events: list[dict[str, Any]]) -> None:
        """Applies a message of the server."""
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.events.append(AllBlocksCleared())
                self._published.clear()
                while self._held:
                    self._rest(self._held.pop())
            elif event["group_idx"]:
                sys.exit("bridge: routers know one KV-cache group, and this model has several; ask Exists instead")
            self._medium = event.get("medium", self._medium)
            for name in event.get("block_hashes", ()):
                if event["type"] == "BlockRemoved":
                    self._remove(name)
                    continue
                self._held.add(name)
                self._idle.pop(name, None)
                self._publish(name)

    def _remove(self, name: Name) -> None:
        self._held.discard(name)
        waiting, gone = [name], []
        while waiting:
            if (each := waiting.pop()) in self._published:
                del self._published[each]
                gone.append(each)
                waiting += self._children.get(each, ())
        self.events += [BlockRemoved([each], self._medium) for each in reversed(gone)]
        self._rest(name)

    def snapshot(self) -> None:
        """Has all published blocks sent, in place of the changes that wait."""
        self.events = [AllBlocksCleared(), *self._published.values()]

    def _publish(self, name: Name) -> None:
        waiting = [name]
        while waiting:
            name = waiting.pop()
            if name in self._held and name in self._blocks and name not in self._published:
                parent, tokens = self._blocks[name]
                if parent is None or parent in self._published:
                    stored = BlockStored([name], parent, tokens, len(tokens), None, self._medium, None)
                    self._published[name] = stored
                    self.events.append(stored)
                    waiting += self._children.get(name, ())

    def _rest(self, name: Name) -> None:
        if name in self._blocks:
            self._idle[name] = None
        if len(self._idle) > MAX_IDLE:
            del self._idle[(oldest := next(iter(self._idle)))]
            parent, _ = self._blocks.pop(oldest)
            self._children[parent].remove(oldest)
            if not self._children[parent]:
                del self._children[parent]


def main() -> None:
    """Runs until it is stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True, nargs=2, help="endpoints of the server's KV events and replays")
    parser.add_argument("--engine", required=True, action="append", help="an engine's KV events; repeat the option")
    parser.add_argument("--namespace", required=True, help="FINGERPRINT@MODEL, as `kvpool events` shows topics")
    parser.add_argument("--publish", required=True, help="where routers subscribe: tcp://HOST:PORT")
    parser.add_argument("--keys", nargs=2, type=Path, help="with CURVE: this subscriber's key_secret, the server's key")
    options = parser.parse_args()
    context, prefixes, numbers = zmq.Context(), Prefixes(), itertools.count(time.time_ns() // 1_000)
    topic = f"kv@pool@{options.namespace.partition('@')[2]}".encode()
    engines, routers = context.socket(zmq.SUB), context.socket(zmq.XPUB)
    engines.subscribe(b"")
    for endpoint in options.engine:
        engines.connect(endpoint)
    routers.setsockopt(zmq.XPUB_VERBOSE, 1)
    routers.setsockopt(zmq.SNDHWM, 100_000)  # Messages beyond it are dropped for a router, as by vLLM's publisher.
    routers.bind(options.publish)
    with Subscriber(*options.server, keys=SubscriberKeys.read(*options.keys) if options.keys else None) as server:
        while True:
            try:
                messages = server.receive(timeout_ms=500)
            except PoolTimeoutError:
                messages = []  # The server is away. Routers keep its blocks until it is back, with a snapshot.
            while engines.poll(0):
                for event in msgspec.msgpack.decode(engines.recv_multipart()[-1])[1]:
                    prefixes.learn(event)
            for message in messages:
                if message.topic.partition("@")[2] in ("@", options.namespace):
                    prefixes.follow(message.events)
            while routers.poll(0):
                if routers.recv()[:1] == b"\1":
                    prefixes.snapshot()
            while prefixes.events:
                batch = EventBatch(time.time(), prefixes.events[:MESSAGE_EVENTS], 0)
                routers.send_multipart((topic, next(numbers).to_bytes(8, "big"), msgspec.msgpack.encode(batch)))
                del prefixes.events[:MESSAGE_EVENTS]


if __name__ == "__main__":
    main()
