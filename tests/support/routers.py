"""Routers that follow servers' streams of prefixes over a network that loses messages, and servers that churn."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.errors import OutOfSpaceError
from kvpool.hashing import block_hashes
from kvpool.namespace import NamespaceSpec
from kvpool.rpc import Namespace
from kvpool.types import BlockRun
from testbed.ports import free_endpoint
from tests.support.processes import ServerProcess

TOKENS = 4
"""In a hash unit, and in a block of the group that needs whole prefixes."""
MODEL = "test/routed"
LOST = 0.2
"""Of the messages between a server and a router."""
RUNS = 50
"""Prompts in one lookup."""


class Router(Protocol):
    """A router that indexes blocks by tokens."""

    def follow(self, nth: int, endpoint: str, replay_endpoint: str) -> None:
        """Subscribes to a server, which it is to call by a number."""

    def promised(self, tokens: Sequence[int]) -> Mapping[int, int]:
        """By server: how many tokens of a prompt's prefix it has."""


class LossyLink:
    """Forwards the messages of a PUB socket, and loses some at random until it is told to stop losing.

    Attributes:
        endpoint: where to subscribe instead.
        num_lost: messages.
    """

    def __init__(self, source: str):
        self.num_lost = 0
        self._chance = random.Random(5)
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(source)
        self._sub.subscribe("")
        self._pub = self._context.socket(zmq.PUB)
        self.endpoint = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self._is_open = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._is_open:
            if self._sub.poll(50):
                frames = self._sub.recv_multipart()
                if self._chance.random() < LOST:
                    self.num_lost += 1
                else:
                    self._pub.send_multipart(frames)

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        self._context.destroy(linger=0)


class RoutedServer:
    """A server with a stream of prefixes, that can be started again at the same endpoints.

    Args:
        name: what routers call it.
        has_replays: routers can ask for what they have missed, and are behind a lossy link; else the stream itself
            has snapshots.

    Attributes:
        endpoint: where routers subscribe.
        replay_endpoint: empty without replays.
    """

    def __init__(self, log_dir: Path, name: str, spec: NamespaceSpec, memory: str = "1MiB", has_replays: bool = True):
        self._log_dir, self._spec = log_dir, spec
        self.endpoint, self.replay_endpoint = f"tcp://{free_endpoint()}", f"tcp://{free_endpoint()}" * has_replays
        stream = ",".join(filter(None, (f"{name}={MODEL}", self.endpoint, self.replay_endpoint)))
        self._flags = ("--memory", memory, "--policy", "lru", "--kv-events-router", stream)
        self._link = LossyLink(self.endpoint) if has_replays else None
        if self._link is not None:
            self.endpoint = self._link.endpoint
        try:
            self.start()
        except BaseException:
            self._close_link()
            raise

    def start(self) -> None:
        self.server = ServerProcess(self._log_dir, *self._flags)
        self.client = Client(ClientConfig(self.server.endpoint, timeout_ms=10_000))
        try:
            self.namespace: Namespace = self.client.open_namespace(self._spec)
            assert self.namespace.wants_tokens
        except BaseException:
            self.stop()
            raise

    def stop(self, is_killed: bool = False) -> None:
        self.client.close()
        (self.server.kill if is_killed else self.server.stop)()

    @property
    def num_lost(self) -> int:
        """Messages that the link has lost."""
        return self._link.num_lost if self._link is not None else 0

    def close(self) -> None:
        self.stop()
        self._close_link()

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()


@dataclass(frozen=True)
class Prompts:
    """Documents with questions about them, so that prompts share prefixes."""

    chance: random.Random
    documents: Sequence[Sequence[int]]

    @classmethod
    def make(cls, seed: int) -> Prompts:
        chance = random.Random(seed)
        return cls(chance, [[chance.randrange(50) for _ in range(160)] for _ in range(12)])

    def one(self) -> list[int]:
        """A document up to somewhere, and one of few questions."""
        shared = list(self.chance.choice(self.documents)[: self.chance.randrange(161)])
        return [*shared, *([self.chance.randrange(4)] * (8 + self.chance.randrange(16)))]


def names(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Of a prompt's blocks, as engines name them: a block of several hash units has the name of the last."""
    ratio = block_tokens // TOKENS
    return block_hashes(tokens, TOKENS)[ratio - 1 :: ratio]


def runs_of(spec: NamespaceSpec, tokens: Sequence[int]) -> list[BlockRun]:
    return [BlockRun(idx, names(tokens, group.block_tokens)) for idx, group in enumerate(spec.groups)]


def store(server: RoutedServer, tokens: Sequence[int], chance: random.Random) -> None:
    """Stores a prompt as an engine does: all blocks of groups that need them, and of others some."""
    spec = server.namespace.spec
    for run in runs_of(spec, tokens):
        group = spec.groups[run.group_idx]
        blocks = list(run.block_hashes)
        if group.hit_blocks:
            stop = chance.randrange(len(blocks) + 1)
            start = max(0, stop - group.hit_blocks - chance.randrange(3))
            part = BlockRun(run.group_idx, blocks[start:stop], blocks[start - 1] if start else b"")
        else:
            part = BlockRun(run.group_idx, blocks)
        if not part.block_hashes:
            continue
        try:
            server.client.put_blocks(server.namespace, part, [bytes(group.chunk_bytes)] * len(part))
        except OutOfSpaceError:
            return  # Everything else is leased or being written: an engine would store nothing, either.
        if not group.hit_blocks:
            server.client.rpc.announce(server.namespace, part, tokens[: len(part) * group.block_tokens])


def churn(server: RoutedServer, prompts: Prompts, steps: int, router: Router | None = None) -> None:
    """Stores prompts in a small arena, which evicts others, and removes blocks from their midst.

    Args:
        router: is asked meanwhile.
    """
    chance, spec = prompts.chance, server.namespace.spec
    for nth in range(steps):
        if router is not None and nth % 4 == 0:
            router.promised(prompts.one())
        tokens = prompts.one()
        if chance.random() < 0.8:
            store(server, tokens, chance)
        elif removable := [run for run in runs_of(spec, tokens) if run.block_hashes]:
            run = chance.choice(removable)
            server.client.admin.remove(
                server.namespace, [BlockRun(run.group_idx, [chance.choice(list(run.block_hashes))])]
            )


def settle(router: Router, servers: Sequence[RoutedServer], nth_call: int) -> None:
    """Waits until the router has heard all that the servers have said: a prompt that is stored last."""
    last = [1_000 + nth_call] * 8
    for server in servers:
        store_all(server, last)
    wanted = dict.fromkeys(range(len(servers)), 8)
    ends_at = time.monotonic() + 60
    while dict(router.promised(last)) != wanted:
        assert time.monotonic() < ends_at, f"the router promises {router.promised(last)}, not {wanted}"
        time.sleep(0.02)


def store_all(server: RoutedServer, tokens: Sequence[int]) -> None:
    """Stores every block of every group."""
    for run in runs_of(server.namespace.spec, tokens):
        group = server.namespace.spec.groups[run.group_idx]
        server.client.put_blocks(server.namespace, run, [bytes(group.chunk_bytes)] * len(run))
        if not group.hit_blocks:
            server.client.rpc.announce(server.namespace, run, tokens)


def compare_with_lookups(router: Router, servers: Sequence[RoutedServer], prompts: Prompts, count: int) -> str:
    """Asks the router and the servers about random prompts; returns a line with the numbers."""
    asked = [prompts.one() for _ in range(count)]
    answers: list[list[int]] = [[] for _ in servers]
    for server, leading in zip(servers, answers, strict=True):
        for at in range(0, count, RUNS):
            runs = [BlockRun(0, names(tokens, TOKENS)) for tokens in asked[at : at + RUNS]]
            found = server.client.lookup(server.namespace, runs, lease=False)
            leading += [hit.num_leading * TOKENS for hit in found.hits]
    num_equal = num_hits = num_differ = 0
    for nth, tokens in enumerate(asked):
        expected = {idx: leading[nth] for idx, leading in enumerate(answers)}
        promised = router.promised(tokens)
        num_equal += {idx: promised.get(idx, 0) for idx in expected} == expected
        num_hits += any(expected.values())
        num_differ += len(set(expected.values())) > 1
    line = f"{count} prompts, {num_equal} answers equal to the lookups of {len(servers)} servers, {num_hits} with a hit"
    assert num_equal == count, line
    assert num_hits > count // 4 and (len(servers) == 1 or num_differ > count // 10), f"the test shows little: {line}"
    return line


def compare_through_a_kill(
    router: Router, servers: Sequence[RoutedServer], prompts: Prompts, counts: tuple[int, int]
) -> list[str]:
    """Compares under churn, and again once the second server was killed and started; returns lines with the numbers."""
    for server in servers:
        churn(server, prompts, 150, router)
    settle(router, servers, 1)
    lines = [compare_with_lookups(router, servers, prompts, counts[0])]
    servers[1].stop(is_killed=True)
    servers[1].start()
    churn(servers[1], prompts, 100, router)
    settle(router, servers, 2)
    return [*lines, compare_with_lookups(router, servers, prompts, counts[1])]


class WireRouter:
    """Reads vLLM's wire format and, as vLLM's example subscriber, asks for what it has missed when it sees a gap.

    Of a server without replays it takes what comes from a snapshot on, and after a gap from the next one on.
    Its index is that of a router that hashes tokens itself: blocks by parent and tokens, for each stream apart.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._streams: dict[int, _Stream] = {}

    def follow(self, nth: int, endpoint: str, replay_endpoint: str) -> None:
        self._streams[nth] = _Stream(self._context, endpoint, replay_endpoint)

    def promised(self, tokens: Sequence[int]) -> Mapping[int, int]:
        for stream in self._streams.values():
            stream.read()
        return {nth: hit for nth, stream in self._streams.items() if (hit := stream.hit(tokens))}

    @property
    def num_snapshots(self) -> Mapping[int, int]:
        """By server without replays: how many snapshots have begun in its stream."""
        return {nth: stream.num_clears for nth, stream in self._streams.items()}

    @property
    def num_replays(self) -> int:
        return sum(stream.num_replays for stream in self._streams.values())

    def close(self) -> None:
        self._context.destroy(linger=0)


class _Stream:
    """One server's stream, and the index of its blocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, replay: str):
        self._sub, self._dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER) if replay else None
        self._sub.connect(endpoint)
        self._sub.subscribe("kv@")
        if self._dealer is not None:
            self._dealer.connect(replay)
        self._last = -1
        self._is_complete = False
        self.num_clears = 0
        self.num_replays = 0
        self.topics: set[bytes] = set()
        self._blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self._children: dict[tuple[int | None, tuple[int, ...]], int] = {}

    def read(self) -> None:
        while self._sub.poll(0):
            topic, seq, payload = self._sub.recv_multipart()
            self.topics.add(topic)
            number = int.from_bytes(seq, "big")
            if self._dealer is None:
                self._take(number, payload)
                continue
            if number > self._last + 1:
                self._replay(self._dealer, self._last + 1)
            if number > self._last:
                self._apply(number, payload)

    def _take(self, number: int, payload: bytes) -> None:
        assert number > self._last
        has_cleared = any(event["type"] == "AllBlocksCleared" for event in msgspec.msgpack.decode(payload)[1])
        self.num_clears += has_cleared
        self._is_complete = has_cleared or (self._is_complete and number == self._last + 1)
        self._last = number
        if self._is_complete:
            self._apply(number, payload)

    def _replay(self, dealer: zmq.Socket[bytes], first: int) -> None:
        self.num_replays += 1
        dealer.send_multipart((b"", first.to_bytes(8, "big")))
        while dealer.poll(10_000):
            _, _, seq, payload = dealer.recv_multipart()
            if not payload:
                return
            self._apply(int.from_bytes(seq, "big"), payload)
        raise AssertionError("a replay does not end")

    def _apply(self, number: int, payload: bytes) -> None:
        self._last = number
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self._blocks.clear()
                self._children.clear()
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    del self._children[self._blocks.pop(name)]
            else:
                parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
                assert len(tokens) == size * len(event["block_hashes"])
                assert parent is None or parent in self._blocks
                for nth, name in enumerate(event["block_hashes"]):
                    key = parent, tuple(tokens[nth * size : (nth + 1) * size])
                    assert name not in self._blocks and key not in self._children
                    self._blocks[name], self._children[key], parent = key, name, name

    def hit(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest run of stored blocks."""
        size = next((len(ids) for _, ids in self._children), TOKENS)
        parent: int | None = None
        for at in range(0, len(tokens) - size + 1, size):
            name = self._children.get((parent, tuple(tokens[at : at + size])))
            if name is None:
                return at
            parent = name
        return len(tokens) // size * size
