"""Searches for calls with which one kind of caller slows, fills or silences a pool for another.

`python -m tests.security.adversary search --seconds 3600` begins with the attacks that were found before, draws others,
changes the worst ones, and makes the worst smaller. An attack is some moves, made again and again by 1, 8 or 64
identities that are strangers, routers, engines or denied. Engines first store their part of the attack's stock; a move
that ends leases or tickets ends those that the moves before it have got. Beside the attackers an honest engine looks
up, and an operator asks for `Stats`, at a higher priority than the attackers, who share the cores. The score is the
worst of what the honest ones saw over the bounds below: above 1 an attack has broken one of them. With `--nginx` all
callers come through the proxy of `deploy/nginx`, and one identity attacks, over up to 200 connections, also with frames
of no call. A machine that is
shared slows down within an hour, and a quiet server with it, so the worst attacks are made again, each beside a new
server with a quiet time of its own: the median is their score. `build/adversary.json` has both.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import json
import os
import random
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import typer

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.rpc import Namespace
from kvpool.protocol import wire
from kvpool.protocol.errors import KVPoolError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.messages import MESSAGE_BYTES, pieces
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import MAX_BATCH_CHUNKS, MAX_RUNS, BlockRun, ShardRange
from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tls import TlsFiles
from kvpool.security.tokens import append_record, create_token
from kvpool.v1 import pool_pb2 as pb
from tests.support.calls import METHODS, SERVICE, Target, requests
from tests.support.certificates import files_in, server_flags
from tests.support.half_sent import PREFACE, frame
from tests.support.nginx import Nginx
from tests.support.processes import ServerProcess
from tests.support.values import group_spec, namespace_spec

CALLERS = ("stranger", "router", "engine", "denied")
IDENTITIES = (1, 8, 64)
CHUNK, STORED, VICTIM_BLOCKS = 64, 8_192, 64
GROUPS, FILLING_BYTES = 64, 8 << 20
MANY_GROUPS = ("Lookup", "LookupStream", "Explain", "Exists")
"""Methods whose runs may be of several groups."""
HELD = {"Lookup": (pb.LookupResponse, "lease_id"), "PutStart": (pb.PutStartResponse, "ticket_id")}
"""Methods that begin leases or tickets: the reply, and its field with their id."""
ENDS = {"Release": ("Lookup", 900), "PutRevoke": ("PutStart", 1)}
"""Methods that end them: of which, and how many of a caller's together at most. It may have a thousand leases."""
ATTACK_S, QUIET_S, REST_S, ENDING_S = 3.0, 2.0, 0.5, 30.0
REPEATED, REPEATS = 5, 3
"""Of the worst attacks, how many are made again, and how often."""
TIMES_ONE, TIMES_MANY = 5.0, 20.0
"""The honest engine's p99 over that of a quiet server: beside one identity, and beside many."""
OPERATOR_S = 1.0
GROWTH_BYTES, IDENTITY_BYTES = 256 << 20, 1 << 20
OUT = Path("build/adversary.json")
NICE = 10


@dataclass(frozen=True)
class Move:
    """One call.

    Args:
        blocks: of a request that names blocks.
        shape: what is sent: a right request, one about new blocks, parts without content, numbers, random bytes, or
            nothing.
        cancel_s: when the caller hangs up; 0: it does not.
        reads: whether it reads the replies.
    """

    method: str
    blocks: int = 1
    shape: str = "right"
    deadline_s: float = 5.0
    cancel_s: float = 0.0
    reads: bool = True


@dataclass(frozen=True)
class Stock:
    """What engines have in the pool before their first move.

    Args:
        blocks: complete ones, of all identities together; each has `STORED` at least.
        chain: of each prefix of them, how many blocks it has.
        shards, chunk_bytes: of each.
        namespaces: other ones, of all identities together, of `GROUPS` groups with a block in each, all of slot sizes
            of their own.
        is_leased: whether every block is leased, and the rest of the arena is filled with leased blocks.
    """

    blocks: int = STORED
    chain: int = STORED
    shards: int = 1
    chunk_bytes: int = CHUNK
    namespaces: int = 0
    is_leased: bool = False


@dataclass(frozen=True)
class Attack:
    """What some callers of one kind do.

    Args:
        at_once: calls of a connection at any time.
        connections: of each identity.
        frames: in place of moves: the kind of HTTP/2's frames that each connection sends without a pause.
    """

    caller: str
    identities: int
    at_once: int
    moves: tuple[Move, ...] = ()
    stock: Stock = Stock()
    connections: int = 1
    frames: str = ""


SEEDS = {
    "large requests": Attack("engine", 8, 64, (Move("Lookup", 65_536),)),
    "large puts": Attack("engine", 8, 64, (Move("PutStart", 8_192),)),
    "requests that are given up": Attack("router", 8, 64, (Move("Explain", 65_536, cancel_s=0.05),)),
    "requests of strangers": Attack("stranger", 1, 64, (Move("Exists", 65_536),)),
    "messages full of empty parts": Attack("router", 1, 8, (Move("Exists", 65_536, "empty parts"),)),
    "replies that nobody reads": Attack("engine", 64, 8, (Move("GetChunks", 8_192, deadline_s=60.0, reads=False),)),
    "calls that send nothing": Attack("engine", 64, 64, (Move("PutChunks", 1, "nothing", deadline_s=60.0),)),
    "reads that wait for silent streams": Attack(
        "engine",
        64,
        64,
        (Move("PutChunks", 1, "nothing", deadline_s=60.0), Move("GetChunks", 65_536, "numbers", deadline_s=60.0)),
    ),
    "listings": Attack("router", 8, 8, (Move("ListNamespaces"), Move("Ledger"))),
    "small calls": Attack("router", 8, 64, (Move("Ping"),)),
    "small calls of many": Attack("engine", 64, 64, (Move("WhoAmI"),)),
    "small calls and puts of many": Attack("engine", 64, 64, (Move("WhoAmI"), Move("PutChunks", 64, deadline_s=60.0))),
    "small calls and random bytes of many": Attack(
        "engine", 64, 64, (Move("WhoAmI"), Move("Get", 8_192, "random", deadline_s=0.05))
    ),
    "large requests of many": Attack("engine", 64, 64, (Move("Lookup", 65_536),)),
    "small puts of many": Attack("engine", 64, 64, (Move("PutStart"),)),
    "whole messages of many": Attack("engine", 64, 64, (Move("PutStart", 4_000),)),
    "puts and releases of many": Attack(
        "engine", 64, 64, (Move("PutStart", 4_000), Move("PutRevoke"), Move("Release", 8_192))
    ),
    "puts without room": Attack("engine", 1, 64, (Move("PutStart", 4_000),)),
    "streams of many": Attack("engine", 64, 64, (Move("LookupStream", 4_000),)),
    "empty parts of many": Attack("engine", 64, 64, (Move("LookupStream", 2_047, "empty parts"),)),
    "verifications of tiny chunks": Attack(
        "engine", 1, 8, (Move("Verify", 8_192, deadline_s=60.0),), Stock(shards=64, chunk_bytes=1)
    ),
    "chunks by their keys": Attack("engine", 8, 8, (Move("PutChunks", 64, "new", deadline_s=60.0),)),
    "leases that end together": Attack("engine", 8, 8, (Move("Lookup"), Move("Release", 8_192))),
    "slot sizes": Attack("engine", 1, 1, (Move("Ping"),), Stock(namespaces=40)),
    "leased prefixes": Attack(
        "engine", 1, 8, (Move("PutStart", 1, "new"), Move("PutRevoke")), Stock(blocks=262_144, chain=1, is_leased=True)
    ),
    "tiny blocks": Attack("engine", 1, 1, (Move("Ping"),), Stock(262_144, 1, shards=64, chunk_bytes=1)),
}
"""What has slowed, filled or silenced a pool before."""
FRAMES = {
    "WINDOW_UPDATE": frame(8, 0, 0, bytes((0, 0, 0, 1))),
    "SETTINGS": frame(4, 0, 0),
    "PING": frame(6, 0, 0, bytes(8)),
    "PRIORITY": frame(2, 0, 5, bytes(5)),
    "unknown": frame(0x42, 0, 0, bytes(64)),
}
"""Of no call: one of each kind."""
FLOODS = {
    "frames that give room": Attack("stranger", 1, 1, connections=32, frames="WINDOW_UPDATE"),
    "frames with settings": Attack("stranger", 1, 1, connections=32, frames="SETTINGS"),
    "calls over many connections": Attack("engine", 1, 18, (Move("Ping"),), connections=400),
}
"""What has slowed or silenced a pool without nginx before it."""


def flood(picks: random.Random) -> Attack:
    """Any attack of one identity over many connections."""
    if picks.random() < 0.3:
        return Attack("stranger", 1, 1, connections=picks.choice((8, 32, 200)), frames=picks.choice(list(FRAMES)))
    made = dataclasses.replace(drawn(picks), identities=1, at_once=picks.choice((1, 8, 64)))
    return dataclasses.replace(made, connections=picks.choice((8, 32, 200)))


def drawn(picks: random.Random) -> Attack:
    """Any attack over one connection of each identity."""
    moves = tuple(_move(picks) for _ in range(picks.choice((1, 1, 2, 3))))
    stock = _stock(picks) if picks.random() < 0.5 else Stock()
    return Attack(picks.choice(CALLERS), picks.choice(IDENTITIES), picks.choice((1, 8, 64, 128)), moves, stock)


def changed(attack: Attack, picks: random.Random) -> Attack:
    """An attack like another one."""
    match picks.randrange(5):
        case 0:
            return dataclasses.replace(attack, identities=picks.choice(IDENTITIES))
        case 1:
            return dataclasses.replace(attack, at_once=picks.choice((1, 8, 64, 128)))
        case 2:
            return dataclasses.replace(attack, moves=(*attack.moves[:2], _move(picks)))
        case 3:
            return dataclasses.replace(attack, stock=_stock(picks))
        case _:
            nth, other = picks.randrange(len(attack.moves)), _move(picks)
            field = picks.choice([field.name for field in dataclasses.fields(Move)])
            moves = list(attack.moves)
            moves[nth] = dataclasses.replace(moves[nth], **{field: getattr(other, field)})
            return dataclasses.replace(attack, moves=tuple(moves))


def smaller(attack: Attack) -> Iterator[Attack]:
    """Attacks with less in them."""
    for nth in range(len(attack.moves) if len(attack.moves) > 1 else 0):
        yield dataclasses.replace(attack, moves=attack.moves[:nth] + attack.moves[nth + 1 :])
    if attack.identities > 1:
        yield dataclasses.replace(attack, identities=IDENTITIES[IDENTITIES.index(attack.identities) - 1])
    for field in ("at_once", "connections"):
        if (count := getattr(attack, field)) > 1:
            yield dataclasses.replace(attack, **{field: count // 2})
    for field in dataclasses.fields(Stock):
        if getattr(attack.stock, field.name) != field.default:
            less = dataclasses.replace(attack.stock, **{field.name: field.default})
            yield dataclasses.replace(attack, stock=less)


def _move(picks: random.Random) -> Move:
    return Move(
        picks.choice(METHODS),
        picks.choice((1, 64, 2_048, 8_192, 65_536)),
        picks.choice(("right", "right", "right", "new", "empty parts", "numbers", "random", "nothing")),
        picks.choice((0.05, 0.5, 5.0, 60.0)),
        picks.choice((0.0, 0.0, 0.002, 0.05)),
        picks.random() < 0.7,
    )


def _stock(picks: random.Random) -> Stock:
    return Stock(
        picks.choice((STORED, 65_536, 262_144)),
        picks.choice((1, 64, STORED)),
        picks.choice((1, 8, 64)),
        picks.choice((1, CHUNK, 1_024)),
        picks.choice((0, 0, 8, 40)),
        picks.random() < 0.3,
    )


# The attackers, in a process of their own


def message(move: Move, names: list[bytes], target: Target, held: Sequence[int] = ()) -> bytes:
    """What a move sends.

    Args:
        names: of blocks.
        held: the leases or tickets that it ends.
    """
    if move.shape == "random":
        return os.urandom(min(64 * move.blocks, 4 << 20))
    descriptor = SERVICE.methods_by_name[move.method].input_type
    if move.shape == "empty parts":
        parts = [field.number for field in descriptor.fields if field.message_type is not None]
        return bytes([(parts or [1])[0] << 3 | 2, 0]) * min(32 * move.blocks, 2 << 20)
    request = requests(target)[move.method]
    if move.shape == "numbers":
        for field in descriptor.fields:
            if field.is_repeated and field.cpp_type == field.CPPTYPE_UINT64:
                getattr(request, field.name).extend([1] * min(2 * move.blocks, MESSAGE_BYTES - 1_024))
        return bytes(request.SerializeToString())
    if move.shape == "new":
        start = random.randrange(1 << 200, 1 << 250)
        names = [nth.to_bytes(32, "big") for nth in range(start, start + move.blocks)]
    blocks = [names[nth % len(names)] for nth in range(move.blocks)]
    if "runs" in descriptor.fields_by_name:
        del request.runs[:]
        groups = range(len(target.spec.groups) if move.method in MANY_GROUPS else 1)
        runs = [BlockRun(group, blocks[group :: len(groups)]) for group in groups]
        request.runs.extend(wire.encode_runs([run for run in runs if run.block_hashes]))
    if move.method == "Release":
        request.lease_ids[:] = held
    if move.method == "PutRevoke" and held:
        request.ticket_id = held[0]
    if move.method == "PutChunks":
        del request.chunks[:]
        payload = bytes(target.spec.groups[0].chunk_bytes)
        for each in blocks[:8_192]:
            key = pb.PoolKey(namespace=target.namespace, block_hash=each)
            request.chunks.append(pb.Chunk(key=key, payload=payload, checksum=checksum(payload)))
    if "lease_ttl_ms" in descriptor.fields_by_name:
        request.lease_ttl_ms = 60_000
    if move.method == "GetChunks":
        request.keys.extend(pb.PoolKey(namespace=target.namespace, block_hash=each) for each in blocks[:8_192])
    return bytes(request.SerializeToString())


async def attack_for(attack: Attack, endpoint: str, ca: str, tokens: list[str], seconds: float) -> int:
    """Makes an attack, once all callers are ready, and says that it begins; returns the number of calls."""
    root, count, tokens = Path(ca).read_bytes(), 0, tokens[: attack.identities]
    names = [nth.to_bytes(32, "big") for nth in range(max(STORED, attack.stock.blocks // len(tokens)))]
    ready = asyncio.Barrier(len(tokens))

    async def caller(nth_caller: int, token: str) -> None:
        nonlocal count
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        async with contextlib.AsyncExitStack() as stack:
            credentials = grpc.ssl_channel_credentials(root)
            channels = [
                await stack.enter_async_context(grpc.aio.secure_channel(endpoint, credentials, options))
                for _ in range(attack.connections)
            ]
            namespace, spec = bytes(32), _spec(f"of {token}")
            if attack.caller == "engine":
                num_namespaces = len(range(nth_caller, attack.stock.namespaces, len(tokens)))
                with contextlib.suppress(grpc.RpcError):  # Its tenant has namespaces of many attacks before this one.
                    namespace, spec = await _stored(channels[0], metadata, names, attack.stock, num_namespaces)
            target, held = Target(namespace, spec=spec), {method: list[int]() for method in HELD}
            sent = [message(move, names, target) for move in attack.moves]
            if not await ready.wait():
                print("begin", flush=True)
            ends_at = time.monotonic() + seconds

            async def make(nth: int, channel: Any) -> None:
                nonlocal count
                while time.monotonic() < ends_at:
                    move, request = attack.moves[nth % len(attack.moves)], sent[nth % len(attack.moves)]
                    count, nth = count + 1, nth + 1
                    begun_by, most = ENDS.get(move.method, ("", 0))
                    if ids := held.get(begun_by):
                        if len(ids) < min(move.blocks, most):
                            continue
                        request, held[begun_by] = message(move, names, target, ids[:most]), ids[most:]
                    elif move.shape == "new" and move.blocks <= STORED:
                        request = message(move, names, target)
                    with contextlib.suppress(Exception, asyncio.CancelledError):  # Whatever comes of it.
                        reply = await _make(channel, move, request, metadata, ends_at)
                        if move.method in HELD:
                            answer, field = HELD[move.method]
                            held[move.method].append(getattr(answer.FromString(reply), field))

            await asyncio.gather(*(make(nth, each) for nth in range(attack.at_once) for each in channels))

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds + 60):
            await asyncio.gather(*(caller(nth, token) for nth, token in enumerate(tokens)))
    return count


def flood_for(kind: str, connections: int, endpoint: str, ca: str, seconds: float) -> int:
    """Sends a frame without a pause on each of many connections, and on others once hung up; returns how often."""
    host, _, port = endpoint.rpartition(":")
    context, many, sent = ssl.create_default_context(cafile=ca), 1_000 * FRAMES[kind], [0] * connections
    context.set_alpn_protocols(["h2"])
    ends_at = time.monotonic() + seconds

    def send(nth: int) -> None:
        while time.monotonic() < ends_at:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(port)), seconds) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as connection,
            ):
                connection.sendall(PREFACE + FRAMES["SETTINGS"])
                while time.monotonic() < ends_at:
                    connection.sendall(many)
                    sent[nth] += 1_000

    with ThreadPoolExecutor(connections) as threads:
        list(threads.map(send, range(connections)))
    return sum(sent)


async def _make(channel: Any, move: Move, request: bytes, metadata: Any, ends_at: float) -> bytes:
    """The last reply."""
    left, reply = max(0.01, ends_at - time.monotonic()), b""
    call = channel.stream_stream(f"/{SERVICE.full_name}/{move.method}")(
        _sent(request if move.shape != "nothing" else None, min(left, move.deadline_s)),
        timeout=min(move.deadline_s, left),
        metadata=metadata,
    )
    try:
        async with asyncio.timeout(move.cancel_s or left):
            if move.reads:
                async for each in call:
                    reply = each
            else:
                await asyncio.sleep(move.deadline_s)
    finally:
        call.cancel()
    return reply


async def _sent(request: bytes | None, wait_s: float) -> AsyncIterator[bytes]:
    if request is None:
        await asyncio.sleep(wait_s)
    else:
        for piece in pieces(request):
            yield piece


def _spec(salt: str) -> NamespaceSpec:
    return namespace_spec(group_spec(chunk_bytes=CHUNK), tenant="", salt=salt)


async def _stored(
    channel: Any, metadata: Any, names: list[bytes], stock: Stock, num_namespaces: int
) -> tuple[bytes, NamespaceSpec]:
    """A namespace of the caller's tenant with a part of the stock."""

    async def call(method: str, request: Any) -> Any:
        answer = getattr(pb, f"{method}Response").FromString
        made = channel.stream_unary(f"/{SERVICE.full_name}/{method}", None, answer)
        return await made(pieces(request.SerializeToString()), timeout=30, metadata=metadata)

    async def opened(spec: NamespaceSpec) -> bytes:
        reply = await call("OpenNamespace", pb.OpenNamespaceRequest(spec=wire.encode_spec(spec)))
        return bytes(reply.fingerprint)

    async def put(name: bytes, runs: list[BlockRun], num_shards: int = 1) -> bool:
        """Stores blocks, and leases them where all are; False: there is no room."""
        about = {"namespace": name, "runs": wire.encode_runs(runs)}
        try:
            shards = wire.encode_shards(ShardRange(0, num_shards))
            grant = await call("PutStart", pb.PutStartRequest(**about, shards=shards))
            if grant.ticket_id:
                sums = [checksum(bytes(stock.chunk_bytes))] * len(grant.offsets) * num_shards
                await call("PutEnd", pb.PutEndRequest(ticket_id=grant.ticket_id, checksums=sums))
            if stock.is_leased:
                await call("Lookup", pb.LookupRequest(**about, lease_ttl_ms=120_000))
        except (grpc.RpcError, asyncio.CancelledError):  # gRPC's, of a call that ended before its last piece was sent.
            return False
        return True

    tenant = Principal.parse((await call("WhoAmI", pb.WhoAmIRequest())).principal).tenant
    group = group_spec(chunk_bytes=stock.chunk_bytes, num_shards=stock.shards)
    spec = namespace_spec(group, group_spec(chunk_bytes=FILLING_BYTES), tenant=tenant, salt=f"stored {stock}")
    name, count = await opened(spec), min(STORED, MAX_BATCH_CHUNKS // stock.shards, MAX_RUNS * stock.chain)
    for at in range(0, len(names), count):
        part = names[at : at + count]
        runs = [BlockRun(0, part[first : first + stock.chain]) for first in range(0, len(part), stock.chain)]
        if not await put(name, runs, stock.shards):
            break
    for nth in range(256 if stock.is_leased else 0):
        if not await put(name, [BlockRun(1, names[nth : nth + 1])]):
            break
    for nth in range(num_namespaces):
        sizes = range(CHUNK * (nth + 1), CHUNK * (nth + 1) + GROUPS)
        with contextlib.suppress(grpc.RpcError):
            other = await opened(
                namespace_spec(*(group_spec(chunk_bytes=size) for size in sizes), tenant=tenant, salt=f"sizes {nth}")
            )
            await asyncio.gather(*(put(other, [BlockRun(idx, names[:1])]) for idx in range(GROUPS)))
    return name, spec


# The honest ones


class Honest:
    """An engine and an operator of a server, who note what they see."""

    def __init__(self, server: ServerProcess, endpoint: str, ca: str, engine: str, operator: str):
        tls = TlsFiles(ca, "", "")
        config = ClientConfig(
            endpoint, transport="grpc", timeout_ms=10_000, lease_ttl_ms=2_000, tls=tls, token_file=engine
        )
        self._server = server
        self._engine = Client(config)
        self._operator = Client(dataclasses.replace(config, token_file=operator))
        spec = namespace_spec(group_spec(chunk_bytes=CHUNK), tenant="victim")
        self._namespace: Namespace = self._engine.open_namespace(spec)
        self._run = BlockRun(0, [nth.to_bytes(32, "big") for nth in range(VICTIM_BLOCKS)])
        self._engine.put_blocks(self._namespace, self._run, [bytes(CHUNK)] * VICTIM_BLOCKS)
        self.quiet_s = 0.0

    def watch(self, ended: threading.Event) -> dict[str, float]:
        """What they see until an event: seconds of the engine's p99 and the operator's longest, refusals, memory."""
        seen: dict[str, float] = {"refused": 0.0, "operator_s": 0.0, "bytes": 0.0}
        times: list[float] = []

        def operate() -> None:
            while not ended.wait(0.1):
                began = time.monotonic()
                try:
                    self._operator.admin.stats()
                except KVPoolError:
                    seen["refused"] += 1
                seen["operator_s"] = max(seen["operator_s"], time.monotonic() - began)
                seen["bytes"] = max(seen["bytes"], self._server.own_bytes)

        thread = threading.Thread(target=operate)
        thread.start()
        while not ended.wait(0.005):
            began = time.monotonic()
            try:
                found = self._engine.lookup(self._namespace, [self._run])
                self._engine.rpc.release_quietly(found.lease_id)
            except KVPoolError:
                seen["refused"] += 1
            times.append(time.monotonic() - began)
        thread.join()
        seen["p99_s"] = statistics.quantiles(times, n=100)[98] if len(times) > 1 else 10.0
        seen["lookups"] = len(times)
        return seen


class Field:
    """A server, its callers, and what an attack does to it. Close it.

    Args:
        module, environment: whose command starts the server.
        has_nginx: whether all callers come through nginx.
    """

    def __init__(
        self,
        directory: Path,
        module: str = "kvpool_server",
        environment: Mapping[str, str] = {},
        *,
        has_nginx: bool = False,
    ):
        self._stack = contextlib.ExitStack()
        authority = Authority.create(directory / "pki")
        issued, known = authority.issue_server([], days=2), directory / "tokens"
        self._ca = files_in(issued).ca
        self._tokens: dict[str, list[str]] = {"stranger": [""] * max(IDENTITIES)}
        roles = {"router": Role.ROUTER, "engine": Role.ENGINE_WRITE, "denied": Role.ENGINE_WRITE}
        denied = directory / "denied"
        lines = []
        for caller, role in roles.items():
            principals = [Principal(f"{caller}-{nth}", role) for nth in range(max(IDENTITIES))]
            self._tokens[caller] = [self._token(known, each) for each in principals]
            lines += [f"{each}\n" for each in principals if caller == "denied"]
        denied.write_text("".join(lines))
        denied.chmod(0o600)
        files = []
        for name, principal in (
            ("engine", Principal("victim", Role.ENGINE_WRITE)),
            ("operator", Principal(ALL_TENANTS, Role.OPERATOR)),
        ):
            files.append(directory / name)
            files[-1].touch(0o600)
            files[-1].write_text(self._token(known, principal))
        flags = [*server_flags(issued)[:4], "--tokens", str(known), "--deny", str(denied), "--memory", "256MiB"]
        tls = TlsFiles(self._ca, "", "")
        started = {"is_executed": True, "module": module, "environment": environment}
        self.server = ServerProcess(directory, *flags, tls=tls, token_file=str(files[1]), **started)
        self._stack.callback(self.server.kill)
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            self._endpoint = self.server.endpoint
            if has_nginx:
                nginx = Nginx(directory, self._endpoint, files_in(issued))
                self._stack.callback(nginx.close)
                self._endpoint = nginx.endpoint
            self._honest = Honest(self.server, self._endpoint, self._ca, str(files[0]), str(files[1]))
            self._watch(QUIET_S)
            self._quiet = self._watch(QUIET_S)
            failed.pop_all()

    def close(self) -> None:
        self._stack.close()

    def score(self, attack: Attack) -> tuple[float, dict[str, float]]:
        """The worst of what was seen over its bound, and all that was seen."""
        given = {"attack": dataclasses.asdict(attack), "endpoint": self._endpoint, "ca": self._ca}
        given |= {"tokens": self._tokens[attack.caller], "seconds": ATTACK_S}
        before = self.server.own_bytes
        command = ["nice", "-n", str(NICE), sys.executable, "-m", "tests.security.adversary", "attack"]
        attackers = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ended = threading.Event()
        try:
            assert attackers.stdin is not None and attackers.stdout is not None
            attackers.stdin.write(json.dumps(given) + "\n")
            attackers.stdin.flush()
            attackers.stdout.readline()  # They begin.
            threading.Timer(ATTACK_S, ended.set).start()
            seen = self._honest.watch(ended)
            with contextlib.suppress(subprocess.TimeoutExpired):  # It is busy with what it began: more than counts.
                seen["calls"] = float(attackers.communicate(timeout=ENDING_S)[0].split()[-1])
        finally:
            ended.set()
            attackers.kill()
            attackers.wait()
        time.sleep(REST_S)
        seen["grown"] = max(0.0, seen.pop("bytes") - before)
        times = TIMES_ONE if attack.identities == 1 else TIMES_MANY
        return max(
            seen["p99_s"] / self._quiet["p99_s"] / times,
            seen["operator_s"] / OPERATOR_S,
            seen["grown"] / (GROWTH_BYTES + attack.identities * IDENTITY_BYTES),
            2.0 * seen["refused"],
        ), seen

    def _watch(self, seconds: float) -> dict[str, float]:
        ended = threading.Event()
        threading.Timer(seconds, ended.set).start()
        return self._honest.watch(ended)

    @staticmethod
    def _token(known: Path, principal: Principal) -> str:
        token, record = create_token(principal, dt.timedelta(days=1))
        append_record(known, record)
        return token


app = typer.Typer()


@app.command()
def attack() -> None:
    """The attackers' process; its standard input says how."""
    given = json.loads(sys.stdin.readline())
    moves, stock = tuple(Move(**move) for move in given["attack"].pop("moves")), Stock(**given["attack"].pop("stock"))
    made, about = Attack(**given["attack"], moves=moves, stock=stock), (given["endpoint"], given["ca"])
    if made.frames:
        print("begin", flush=True)
        print(flood_for(made.frames, made.connections, *about, given["seconds"]))
    else:
        print(asyncio.run(attack_for(made, *about, given["tokens"], given["seconds"])))


@app.command()
def search(seconds: float = 600.0, seed: int = 0, nginx: bool = False) -> None:
    """Search, and print the worst."""
    picks, worst = random.Random(seed), list[tuple[float, Attack, dict[str, float]]]()
    seeds = list((FLOODS if nginx else SEEDS).values())
    ends_at = time.monotonic() + seconds
    with _new_field(nginx) as field:
        while time.monotonic() < ends_at:
            if seeds:
                made = seeds.pop()
            elif nginx:
                made = flood(picks)
            else:
                made = changed(picks.choice(worst)[1], picks) if picks.random() < 0.5 else drawn(picks)
            score, seen = field.score(made)
            print(f"{score:7.2f} {made} {seen}", flush=True)
            worst = sorted([*worst, (score, made, seen)], key=lambda each: -each[0])[:8]
        score, made, seen = worst[0]
        while (less := next((each for each in smaller(made) if field.score(each)[0] > 0.8 * score), None)) is not None:
            made = less
        print(f"the worst, made smaller: {made}")
    again = [_again(made, nginx) for _, made, _ in worst[:REPEATED]]
    print("made again beside new servers:", *(f"{score:.2f}" for score in again))
    OUT.parent.mkdir(exist_ok=True)
    found = [[score, dataclasses.asdict(each), seen] for score, each, seen in worst]
    OUT.write_text(json.dumps({"again": again, "found": found}, indent=1))


def _again(made: Attack, nginx: bool) -> float:
    """The median score of an attack beside a new server."""
    with _new_field(nginx) as field:
        return statistics.median(field.score(made)[0] for _ in range(REPEATS))


@contextlib.contextmanager
def _new_field(has_nginx: bool) -> Iterator[Field]:
    with tempfile.TemporaryDirectory() as path, contextlib.closing(Field(Path(path), has_nginx=has_nginx)) as field:
        yield field


if __name__ == "__main__":
    app()
