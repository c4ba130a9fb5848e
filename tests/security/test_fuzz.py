"""Random input for every parser that strangers reach, but for two that have files of their own.

Replies into clients and schedulers: `test_replies.py`. Journals: `test_file_tier_bounds.py`. `make fuzz TARGET=...`
tries a million inputs of one target. An input is made of a seed, which a failure names.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import msgspec
import numpy as np
import pytest
import structlog
import zmq
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvpool.client.events import Subscriber
from kvpool.protocol import wire
from kvpool.protocol.errors import InvalidReplyError, KVPoolError
from kvpool.protocol.text import parse_quota
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tokens import create_token, parse_lifetime, read_records
from kvpool.transport.data_port import Header, Kind, Signer, pack_offsets
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.data_plane.admission import MAX_SEATS
from kvpool_server.data_plane.permits import PermitTable
from kvpool_server.data_plane.worker import TALLY_COLUMNS, Connection, DataPort
from kvpool_server.events.ledger import Ledger
from kvpool_server.events.messages import Encoder, History
from kvpool_server.events.publisher import Publisher
from kvpool_server.settings import config, loading
from kvpool_server.sharing import Limits
from tests.support.cpu_time import MAX_CPU_S, LongestPart
from tests.support.effort import effort
from tests.support.integrity import check_integrity
from tests.support.lying_pool import altered, flipped
from tests.support.processes import wait_for
from tests.support.values import block_hash, group_spec, namespace_spec
from tests.support.wire_service import METHODS, WireHouse
from vllm_plugin.config import ConnectorConfig

NUM_INPUTS = effort(1_000)
NUM_DRAINS = effort(100)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Refusals are logged, and would take longer than what they are about."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.configure(**before)


def fuzz(try_one: Callable[[random.Random], None]) -> None:
    """Tries inputs, and prints how many, and how long the longest took."""
    longest = LongestPart()
    for seed in range(NUM_INPUTS):
        try:
            with longest.part():
                try_one(random.Random(seed))
        except Exception as error:
            raise AssertionError(f"input {seed}: {error!r}") from error
    assert longest.seconds < MAX_CPU_S
    print(f"{NUM_INPUTS} inputs; the longest took {longest}")


# Requests to the server

SPEC = namespace_spec(group_spec(chunk_bytes=64, num_shards=2), tenant="acme", salt="fuzz")
NAMES = [block_hash(nth) for nth in range(3)]
ENGINE, OPERATOR = Principal("acme", Role.ENGINE_WRITE), Principal(ALL_TENANTS, Role.OPERATOR)
FAULTS = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL})
"""Statuses of errors that nobody foresaw."""


def _requests(ticket_id: int, lease_id: int, offset: int) -> dict[str, Message]:
    """A request of each kind that the server would grant, or nearly."""
    runs = [pb.BlockRun(block_hashes=b"".join(NAMES))]
    named: dict[str, Any] = {"namespace": SPEC.fingerprint(), "runs": runs}
    key = pb.PoolKey(namespace=SPEC.fingerprint(), block_hash=NAMES[0])
    whole = pb.ShardRange(count=2)
    made: dict[str, Message] = {
        "OpenNamespace": pb.OpenNamespaceRequest(spec=wire.encode_spec(SPEC), opener="host"),
        "Lookup": pb.LookupRequest(**named, lease_ttl_ms=1_000, locate=True),
        "LookupStream": pb.LookupRequest(**named, lease_ttl_ms=1_000, locate=True),
        "PutStart": pb.PutStartRequest(**named, shards=whole),
        "PutEnd": pb.PutEndRequest(ticket_id=ticket_id, checksums=[0] * 6),
        "PutRevoke": pb.PutRevokeRequest(ticket_id=ticket_id),
        "PutChunks of regions": pb.PutChunksRequest(ticket_id=ticket_id, offset=offset, payload=bytes(64)),
        "Get": pb.GetRequest(lease_id=lease_id, **named, shards=whole),
        "GetChunks of regions": pb.GetChunksRequest(lease_id=lease_id, offsets=[offset], region_bytes=128),
        "Release": pb.ReleaseRequest(lease_ids=[lease_id]),
        "PutChunks": pb.PutChunksRequest(chunks=[pb.Chunk(key=key, payload=bytes(64))]),
        "GetChunks": pb.GetChunksRequest(keys=[key]),
        "Verify": pb.VerifyRequest(**named),
        "Remove": pb.RemoveRequest(**named),
        "Explain": pb.ExplainRequest(**named),
        "Hint": pb.HintRequest(**named, kind=pb.HINT_KIND_PIN, pin_seconds=1),
        "Clear": pb.ClearRequest(namespace=SPEC.fingerprint()),
        "SetQuotas": pb.SetQuotasRequest(quotas=[pb.Quota(subject="tenant:acme", limit_bytes=1 << 20)]),
    }
    return {name: GetMessageClass(method.input_type)() for name, method in METHODS.items()} | made


def test_no_request_brings_a_server_down() -> None:
    house = WireHouse(1 << 20, 1 << 12, Limits(max_ttl_ms=1_000, grace_ms=0))
    counts: Counter[grpc.StatusCode] = Counter()
    methods = sorted(_requests(1, 1, 0).keys() - {"Drain"})  # A server that drains refuses whatever else is sent.

    def granted(method: str, request: Message) -> Any:
        answer = house.service.call(ENGINE, method, request)
        return answer.replies[0] if answer.replies else None

    def try_one(dice: random.Random) -> None:
        if dice.random() < 0.05:  # Sound calls come between, so that there is something to break.
            house.advance(1.0)
            granted("OpenNamespace", sound["OpenNamespace"])
            started = granted("PutStart", sound["PutStart"])
            found = granted("Lookup", sound["Lookup"])
            offset = started.offsets[0] if started is not None and started.offsets else 0
            sound.update(_requests(started.ticket_id if started else 1, found.lease_id if found else 1, offset))
            check_integrity(house.pool)
        method = dice.choice(methods)
        request = sound[method]
        requests = [
            altered(request, dice) if request.DESCRIPTOR.fields else flipped(b"", dice)
            for _ in range(dice.choice((1, 1, 2)))
        ]
        caller = dice.choice((ENGINE, ENGINE, OPERATOR, None))
        answer = house.service.send(caller, method.split()[0], *requests)
        assert answer.code not in FAULTS, f"{method}: {answer}"
        counts[answer.code] += 1

    sound = _requests(1, 1, 0)
    fuzz(try_one)
    check_integrity(house.pool)
    assert counts[grpc.StatusCode.OK] > NUM_INPUTS // 20 and counts[grpc.StatusCode.INVALID_ARGUMENT] > NUM_INPUTS // 20
    house.service.call(OPERATOR, "Clear", pb.ClearRequest())
    house.service.call(OPERATOR, "SetQuotas", pb.SetQuotasRequest(quotas=[pb.Quota(subject="tenant:acme")]))
    assert granted("OpenNamespace", _requests(1, 1, 0)["OpenNamespace"]) is not None
    dice = random.Random(0)
    for caller in (ENGINE, None):
        for _ in range(NUM_DRAINS):
            answer = house.service.send(caller, "Drain", altered(sound["Drain"], dice))
            assert answer.code not in FAULTS, f"Drain: {answer}"
    assert granted("OpenNamespace", sound["OpenNamespace"]) is not None, "somebody but the operator drained the server"
    for _ in range(NUM_DRAINS):
        answer = house.service.send(OPERATOR, "Drain", altered(sound["Drain"], dice))
        assert answer.code not in FAULTS, f"Drain: {answer}"


# What comes to the data port

ARENA_BYTES, REGION_BYTES, HIDDEN = 1 << 12, 64, 0xEE
READABLE, WRITABLE = (1 << 10, 2 << 10), (3 << 10, 3200)


@contextmanager
def _pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        yield client, server


def test_no_bytes_bring_a_data_worker_down_or_move_what_no_permit_covers() -> None:
    key = b"k" * 32
    permits = PermitTable(key, 16, 1, MAX_SEATS)
    arena = np.full(ARENA_BYTES, HIDDEN, np.uint8)
    tally = np.zeros(TALLY_COLUMNS, np.uint64)
    port = DataPort(arena.data, Signer(key), b"n" * 16, tally, permits.entries, permits.words_of(0))
    until = time.monotonic_ns() + (1 << 50)
    packed = {Kind.READ: pack_offsets(READABLE), Kind.WRITE: pack_offsets(WRITABLE)}
    shown = []
    for hold_id, (kind, offsets) in enumerate(packed.items(), 1):
        permit = permits.permit(kind, hold_id, until, REGION_BYTES, offsets)
        header = Header(kind, 0, len(offsets), REGION_BYTES, holding_id=hold_id, permit=permit)
        shown.append(header.encode() + offsets.tobytes())
    read = Header(Kind.MOVE, 0, 2, REGION_BYTES).encode()
    sound = [shown[0] + read, shown[1] + read + bytes(2 * REGION_BYTES), read, shown[0] + read + read + shown[1]]
    moved = 0

    def try_one(dice: random.Random) -> None:
        nonlocal moved
        arena[:] = HIDDEN
        for offset in READABLE:
            arena[offset : offset + REGION_BYTES] = 1
        before = arena.copy()
        sent = dice.choice(sound)
        if dice.random() < 0.8:
            sent = flipped(sent, dice) if dice.random() < 0.7 else dice.randbytes(dice.randrange(200))
        with _pair() as (client, server):
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            seat = port.admission.admit(server, "127.0.0.1")
            assert seat is not None
            Connection(seat, port).serve()
            port.admission.leave(seat)
            server.close()
            client.settimeout(10)
            received = bytearray()
            while part := client.recv(1 << 16):
                received += part
        assert received.count(bytes([HIDDEN]) * 8) == 0, "bytes that no permit covers were sent"
        moved += b"\1" * REGION_BYTES in received
        for offset in WRITABLE:
            before[offset : offset + REGION_BYTES] = arena[offset : offset + REGION_BYTES]
        assert np.array_equal(arena, before), "bytes that no permit covers were changed"

    try:
        fuzz(try_one)
        assert moved > NUM_INPUTS // 50
    finally:
        permits.close()


# Configuration

ODD: tuple[Any, ...] = (
    "", "0", "-1", "1", "true", "64MiB", "1e400", "nan", "\0", "\n", "a" * 5_000, "127.0.0.1:0", "[::]:99999", ":",
    "unix:", "tenant:a=1GiB", "file:/x,size=1GiB", "file:,,=", "mooncake:master=", "0o777", "\udcff", 0, -1, 1 << 70,
    1.5, float("nan"), float("inf"), True, None, [], {}, ["", 1], {"ca": "/nowhere", "x": 1}, ("a",), b"x",
)  # fmt: skip
TEXTS = ("tenant:acme=20GiB", "90d", create_token(ENGINE, parse_lifetime("90d"))[1].line(), "namespace:ab=1KiB", "1h")


def test_no_configuration_is_accepted_or_refused_but_with_an_error_of_kvpools(tmp_path: Path) -> None:
    server_keys = [*config.ServerConfig.model_fields, "unknown"]
    engine_keys = [*ConnectorConfig.__dataclass_fields__, "unknown"]
    toml, tokens = tmp_path / "server.toml", tmp_path / "tokens"
    taken: Counter[str] = Counter()

    def some(keys: list[str], dice: random.Random) -> dict[str, Any]:
        return {dice.choice(keys): dice.choice(ODD) for _ in range(dice.choice((1, 1, 2, 3)))}

    def text(dice: random.Random) -> str:
        return flipped(dice.choice(TEXTS).encode(), dice).decode(errors="replace")

    def from_file(dice: random.Random) -> None:
        toml.write_bytes(flipped(b'memory = "64MiB"\nlisten = "127.0.0.1:0"\nquota = ["tenant:a=1GiB"]\n', dice))
        loading.load({"config": str(toml)})

    def from_environment(dice: random.Random) -> None:
        given = {f"KVPOOL_{key.upper()}": str(value) for key, value in some(server_keys, dice).items()}
        with patch.dict(os.environ, {name: value for name, value in given.items() if "\0" not in value}, clear=True):
            loading.load({})

    def from_tokens(dice: random.Random) -> None:
        tokens.write_text(text(dice))
        tokens.chmod(0o600)
        read_records(tokens)

    targets: dict[str, Callable[[random.Random], object]] = {
        "flags": lambda dice: loading.load(some(server_keys, dice)),
        "environment": from_environment,
        "file": from_file,
        "connector": lambda dice: ConnectorConfig.parse(some(engine_keys, dice)),
        "tokens": from_tokens,
        "quota": lambda dice: parse_quota(text(dice)),
        "lifetime": lambda dice: parse_lifetime(text(dice)),
    }

    def try_one(dice: random.Random) -> None:
        name = dice.choice(list(targets))
        with suppress(KVPoolError):
            targets[name](dice)
            taken[name] += 1

    fuzz(try_one)
    assert taken.keys() >= {"flags", "environment", "connector"}


# KV events: requests to the publisher, messages to subscribers

ANY = bytes(8)
REQUESTS = ([b"", ANY], [b"", b"short"], [b"", b""], [b""], [b"x"], [b"", ANY, b"x"], [b"x", ANY])
"""Frames of replay requests; `ANY` becomes any number."""


def test_no_frames_of_kv_events_bring_a_publisher_or_a_subscriber_down() -> None:
    counters: Counter[str] = Counter()
    ledger = Ledger(lambda flush: None, counters, first_seq=100, batch_blocks=10)
    anywhere = "tcp://127.0.0.1:0"
    publisher = Publisher(ledger, History(ledger, Encoder(), counters, 1_000), anywhere, anywhere)
    context = zmq.Context()
    pub, dealer = context.socket(zmq.PUB), context.socket(zmq.DEALER)
    pub.bind(anywhere)
    dealer.connect(publisher.replay_endpoint)
    subscriber = Subscriber(pub.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
    event = {"type": "BlockStored", "block_hashes": [1], "group_idx": 0}
    sound = [b"kv@ns@model", bytes(8), msgspec.msgpack.encode([1.5, [event], 0])]
    heard = 0

    def joined() -> bool:
        pub.send_multipart([b"", bytes(8), sound[2]])
        return bool(subscriber.receive(10))

    def try_one(dice: random.Random) -> None:
        nonlocal heard
        frames = [flipped(frame, dice) if dice.random() < 0.5 else frame for frame in sound]
        frames[1] = dice.choice((dice.randbytes(8), frames[1]))
        if dice.random() < 0.2:
            frames = frames[: dice.randrange(1, 4)] + [b"more"] * dice.randrange(2)
        pub.send_multipart(frames)
        try:
            heard += len(subscriber.receive(10_000))
        except InvalidReplyError:
            pass
        subscriber._last_seq = -1  # Whatever number came last, the next message counts.
        request = [dice.randbytes(8) if frame == ANY else frame for frame in dice.choice(REQUESTS)]
        with suppress(zmq.Again):  # The publisher is not done with the requests before.
            dealer.send_multipart(request, zmq.NOBLOCK)
        with suppress(zmq.Again):
            while dealer.recv_multipart(zmq.NOBLOCK):
                pass

    try:
        wait_for(joined, "the subscription")
        fuzz(try_one)
        assert heard > NUM_INPUTS // 20
        with Subscriber(publisher.endpoint, publisher.replay_endpoint) as another:
            assert another.replay(0)[0].events == [{"type": "AllBlocksCleared"}]
    finally:
        subscriber.close()
        context.destroy(linger=0)
        publisher.close()
