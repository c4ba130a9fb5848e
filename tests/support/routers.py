"""Routers that follow servers through the bridge of `examples/routing`, and servers that churn."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.rpc import Namespace
from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.hashing import block_hashes
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun
from kvpool_server.events.messages import BlockStored, EventBatch
from testbed.ports import free_endpoint
from tests.support.events import low_64_bits
from tests.support.processes import ServerProcess

TOKENS = 4
"""In a hash unit, and in a block of the group that needs whole prefixes."""
MODEL = "test/routed"
BRIDGE = Path(__file__).parents[2] / "examples" / "routing" / "bridge.py"
RUNS = 50
"""Prompts in one lookup."""


class Router(Protocol):
    """A router that indexes blocks by tokens."""

    def follow(self, nth: int, endpoint: str) -> None:
        """Subscribes to a server's bridge; the router is to call the server by a number."""

    def promised(self, tokens: Sequence[int]) -> Mapping[int, int]:
        """By server: how many tokens of a prompt's prefix it has."""


class Bridge:
    """`examples/routing/bridge.py` as a subprocess.

    Args:
        server: endpoints of the server's KV events and replays.
        engines: endpoints of engines' KV events.

    Attributes:
        endpoint: where routers subscribe.
    """

    def __init__(self, server: tuple[str, str], engines: Sequence[str], fingerprint: bytes, model: str):
        self.endpoint = f"tcp://{free_endpoint()}"
        options = [flag for each in engines for flag in ("--engine", each)]
        options += ["--namespace", f"{fingerprint.hex()}@{model}", "--publish", self.endpoint]
        self._process = subprocess.Popen([sys.executable, BRIDGE, "--server", *server, *options])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class RoutedServer:
    """A server behind a bridge, that can be started again at the same endpoints, and the events of one engine.

    Attributes:
        endpoint: where routers subscribe.
    """

    def __init__(self, log_dir: Path, spec: NamespaceSpec, memory: str = "1MiB"):
        self._log_dir, self._spec = log_dir, spec
        events, replays = f"tcp://{free_endpoint()}", f"tcp://{free_endpoint()}"
        self._flags = ("--memory", memory, "--policy", "lru", "--kv-events", events, "--kv-events-replay", replays)
        self._context = zmq.Context()
        self._engine = self._context.socket(zmq.XPUB)
        engine = f"tcp://127.0.0.1:{self._engine.bind_to_random_port('tcp://127.0.0.1')}"
        self._bridge = Bridge((events, replays), [engine], spec.fingerprint(), spec.model)
        self.endpoint = self._bridge.endpoint
        try:
            assert self._engine.poll(30_000), "the bridge has subscribed to the engine's events"
            self.start()
        except BaseException:
            self._end()
            raise

    def start(self) -> None:
        self.server = ServerProcess(self._log_dir, *self._flags)
        self.client = Client(ClientConfig(self.server.endpoint, timeout_ms=10_000))
        try:
            self.namespace: Namespace = self.client.open_namespace(self._spec)
        except BaseException:
            self.stop()
            raise

    def tell(self, run: BlockRun, tokens: Sequence[int]) -> None:
        """Publishes, as an engine does, which tokens the blocks of a run stand for."""
        stored = BlockStored(
            list(map(low_64_bits, run.block_hashes)),
            low_64_bits(run.parent_hash) if run.parent_hash else None,
            list(tokens),
            TOKENS,
            None,
            "CPU",
            None,
        )
        self._engine.send_multipart((b"", bytes(8), msgspec.msgpack.encode(EventBatch(0.0, [stored], 0))))

    def stop(self, is_killed: bool = False) -> None:
        self.client.close()
        (self.server.kill if is_killed else self.server.stop)()

    def close(self) -> None:
        self.stop()
        self._end()

    def _end(self) -> None:
        self._bridge.close()
        self._context.destroy(linger=0)


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


def runs_of(spec: NamespaceSpec, tokens: Sequence[int]) -> list[BlockRun]:
    return [BlockRun(idx, block_hashes(tokens, TOKENS)) for idx, _ in enumerate(spec.groups)]


def store(server: RoutedServer, tokens: Sequence[int], chance: random.Random) -> None:
    """Stores a prompt as an engine does, whose events come before or after the server's."""
    (run,) = runs_of(server.namespace.spec, tokens)
    if not run.block_hashes:
        return
    is_first = chance.random() < 0.5
    if is_first:
        server.tell(run, tokens[: len(run) * TOKENS])
    try:
        store_all(server, run)
    except OutOfSpaceError:
        return  # Everything else is leased or being written: an engine would store nothing, either.
    if not is_first:
        server.tell(run, tokens[: len(run) * TOKENS])


def store_all(server: RoutedServer, run: BlockRun) -> None:
    group = server.namespace.spec.groups[run.group_idx]
    server.client.put_blocks(server.namespace, run, [bytes(group.chunk_bytes)] * len(run))


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
        (run,) = runs_of(server.namespace.spec, last)
        store_all(server, run)
        server.tell(run, last)
    wanted = dict.fromkeys(range(len(servers)), 8)
    ends_at = time.monotonic() + 60
    while dict(router.promised(last)) != wanted:
        assert time.monotonic() < ends_at, f"the router promises {router.promised(last)}, not {wanted}"
        time.sleep(0.02)


def compare_with_lookups(router: Router, servers: Sequence[RoutedServer], prompts: Prompts, count: int) -> str:
    """Asks the router and the servers about random prompts; returns a line with the numbers."""
    asked = [prompts.one() for _ in range(count)]
    answers: list[list[int]] = [[] for _ in servers]
    for server, leading in zip(servers, answers, strict=True):
        for at in range(0, count, RUNS):
            runs = [BlockRun(0, block_hashes(tokens, TOKENS)) for tokens in asked[at : at + RUNS]]
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
    """Reads vLLM's wire format. What comes before a snapshot, or after a gap until the next one, is left out.

    Its index is that of a router that hashes tokens itself: blocks by parent and tokens, for each stream apart.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._streams: dict[int, _Stream] = {}

    def follow(self, nth: int, endpoint: str) -> None:
        self._streams[nth] = _Stream(self._context, endpoint)

    def promised(self, tokens: Sequence[int]) -> Mapping[int, int]:
        for stream in self._streams.values():
            stream.read()
        return {nth: hit for nth, stream in self._streams.items() if (hit := stream.hit(tokens))}

    @property
    def has_snapshots(self) -> bool:
        """Whether a snapshot of every server has come."""
        return all(stream.is_complete for stream in self._streams.values())

    def close(self) -> None:
        self._context.destroy(linger=0)


class _Stream:
    """One server's stream, and the index of its blocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str):
        self._sub = context.socket(zmq.SUB)
        self._sub.connect(endpoint)
        self._sub.subscribe("kv@")
        self._last = -1
        self.is_complete = False
        self._blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self._children: dict[tuple[int | None, tuple[int, ...]], int] = {}

    def read(self) -> None:
        while self._sub.poll(0):
            _, seq, payload = self._sub.recv_multipart()
            number = int.from_bytes(seq, "big")
            assert number > self._last
            has_cleared = any(event["type"] == "AllBlocksCleared" for event in msgspec.msgpack.decode(payload)[1])
            self.is_complete = has_cleared or (self.is_complete and number == self._last + 1)
            self._last = number
            if self.is_complete:
                self._apply(payload)

    def _apply(self, payload: bytes) -> None:
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
