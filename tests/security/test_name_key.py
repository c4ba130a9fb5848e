"""With a name key neither the server nor a neighbour learns a block's hash, by which guesses of prompts are tested."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.events import Subscriber
from kvpool.protocol import wire
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.namespace import NamespaceSpec, differences
from kvpool.protocol.types import BlockRun, Chunk, PoolKey
from kvpool.security.name_key import NameKey, named_by
from kvpool.v1 import pool_pb2 as pb
from tests.conftest import Connect
from tests.support.processes import ServerProcess, wait_for
from tests.support.recorder import Recorder
from tests.support.values import block_hash, namespace_spec, payload

CHUNK_BYTES = 256
PARENT, *HASHES = (block_hash(f"a prompt that nobody may guess {nth}") for nth in range(7))
RUN = BlockRun(0, HASHES[:4], PARENT)
INLINE, DROPPED = HASHES[4:]
TOKEN_FIELDS = {"block_hash", "block_hashes", "parent_hash"}
PIECE_BYTES = 64 << 10
METRIC = re.compile(r'kvpool_rpc_seconds_count{method="(\w+)",status="OK"} [1-9]')


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    NameKey.create(tmp_path / "name.key")
    return str(tmp_path / "name.key")


def _names_blocks(message: Any) -> bool:
    """Whether a message has a field for a block's hash, at any depth."""
    return any(
        field.name in TOKEN_FIELDS or (field.message_type is not None and _names_blocks(field.message_type))
        for field in message.fields
    )


NAMING = {each.name for each in pb.DESCRIPTOR.services_by_name["Pool"].methods if _names_blocks(each.input_type)}


def _use_every_method(client: Client, spec: NamespaceSpec) -> None:
    """Has each method called whose request names blocks, and each with blocks that the pool has."""
    namespace = client.open_namespace(spec)
    blocks = [payload(name, CHUNK_BYTES) for name in RUN.block_hashes]
    assert client.put_blocks(namespace, RUN, blocks).receipt.num_complete == len(RUN)
    pending = client.rpc.lookup_async(namespace, [RUN], wait_ms=10)
    waited = wait_for(lambda: pending.result(1.0), "an answer")
    found = client.lookup(namespace, [RUN])
    assert found.hits[0].num_leading == waited.hits[0].num_leading == len(RUN)
    loaded = client.get_blocks(namespace, found.lease_id, RUN)
    assert [bytes(each) for each in loaded] == [each.tobytes() for each in blocks]
    client.release([found.lease_id, waited.lease_id])
    keys = [PoolKey(namespace.fingerprint, 0, name, 0) for name in (INLINE, DROPPED)]
    body = bytes(CHUNK_BYTES)
    client.chunks.put([Chunk(each, body, checksum(body), RUN.block_hashes[-1]) for each in keys])
    assert [each and each.key for each in client.chunks.get(keys)] == keys
    assert client.admin.verify(namespace, [RUN]) == (len(RUN), 0)
    name_of = client.rpc.name_of
    named = BlockRun(0, list(map(name_of, RUN.block_hashes)), name_of(RUN.parent_hash))
    assert client.admin.explain(namespace.fingerprint, [named]).runs
    assert client.exists(namespace.fingerprint, [BlockRun(0, RUN.block_hashes)]).hits[0].num_leading == len(RUN)
    assert client.hints.pin(namespace, [RUN], 60).num_blocks == len(RUN)
    assert client.admin.remove(namespace, [BlockRun(0, [DROPPED], INLINE)]) == 1


def _contains(place: bytes, names: list[bytes]) -> bool:
    """Whether a place holds a name, or a part of it that could tell guesses apart, as bytes or in hexadecimal."""
    return any(part in place for name in names for part in (name[:8], name[-8:], name.hex()[:16].encode()))


def _memory(pid: int) -> bytes:
    """What a process has in its writable memory, without the pieces that are zero."""
    held = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, mode, *_ = line.split()
            start, end = (int(each, 16) for each in span.split("-"))
            if mode.startswith("rw"):
                memory.seek(start)
                pieces = (memory.read(min(PIECE_BYTES, end - at)) for at in range(start, end, PIECE_BYTES))
                held += [piece for piece in pieces if piece.count(0) < len(piece)]
    return b"".join(held)


@pytest.mark.parametrize("has_key", [True, False], ids=["with a key", "without"])
def test_the_server_learns_no_hash(
    has_key: bool, pool_server: Callable[..., ServerProcess], tmp_path: Path, key_file: str
) -> None:
    """The case without a key shows that the search finds what is there."""
    tier, audit, events = tmp_path / "tier", tmp_path / "audit", f"ipc://{tmp_path}/events"
    tier.mkdir(0o700)
    server = pool_server(
        "--tier", f"file:{tier},size=16MiB", "--kv-events", events, "--kv-events-replay", f"{events}-replay",
        "--kv-events-hashes", "bytes", "--log-level", "debug", "--audit-log", str(audit),
    )  # fmt: skip
    with Recorder(server.endpoint) as recorder:
        config = ClientConfig(recorder.endpoint, "grpc", timeout_ms=10_000, name_key_file=key_file if has_key else "")
        with Client(config) as client:
            _use_every_method(client, namespace_spec())
        recorder.shutdown()
        on_the_wire = bytes(recorder.seen)

    def called() -> set[str]:
        with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10) as answer:
            return set(METRIC.findall(answer.read().decode()))

    # What comes over LookupStream counts as Lookup, and Lookup with a wait as LookupWait.
    assert "Lookup" in NAMING
    wait_for(lambda: called() >= NAMING - {"LookupStream"} | {"LookupWait"}, "each method to be counted")
    with Subscriber(events, f"{events}-replay") as subscriber:
        published = msgspec.msgpack.encode([each.events for each in subscriber.receive(10_000)])
    in_memory = _memory(server.pid)
    server.stop()
    in_the_tier = b"\0".join(file.read_bytes() for file in tier.rglob("*") if file.is_file())
    written = audit.read_bytes() + server.stdout.encode() + server.stderr.encode()

    hashes = [PARENT, *HASHES]
    key = NameKey.read(Path(key_file))
    names = list(map(key.name, hashes)) if has_key else hashes
    for place in (on_the_wire, published, in_memory, in_the_tier):
        assert _contains(place, names)
        assert has_key != _contains(place, hashes)
    assert not _contains(written, [*hashes, *names])
    if has_key:
        secret = bytes.fromhex(Path(key_file).read_text())
        for place in (on_the_wire, published, in_memory, in_the_tier, written):
            assert not _contains(place, [secret])


@pytest.mark.parametrize("has_other_key", [True, False], ids=["another key", "no key"])
def test_guesses_without_the_key_find_nothing(
    has_other_key: bool, shared_server: ServerProcess, connect: Connect, tmp_path: Path, key_file: str
) -> None:
    """The intruder knows the owner's namespace, and has guessed each token of the prompt."""
    owner = connect(shared_server, name_key_file=key_file)
    namespace = owner.open_namespace(namespace_spec())
    owner.put_blocks(namespace, RUN, [payload(name, CHUNK_BYTES) for name in RUN.block_hashes])
    other = NameKey.create(tmp_path / "other.key") if has_other_key else None
    intruder = connect(shared_server, **({"name_key_file": str(tmp_path / "other.key")} if other else {}))
    told = f"this client has the key {other.digest}" if other else "this client has no key; give"
    with pytest.raises(InvalidRequestError, match=rf"named by the key \w{{32}}, and {told}"):
        intruder.open_namespace(namespace.spec)
    own = intruder.open_namespace(named_by(namespace.spec, None))
    (difference,) = differences(own.spec, namespace.spec)
    assert (difference.field, difference.ours) == ("extra['name_key']", other.digest if other else None)
    assert intruder.lookup(own, [RUN], prefix_only=False).hits[0].complete == 0
    guesses = [other.run(RUN) if other else RUN]
    runs, stub, fingerprint = wire.encode_runs(guesses), intruder.rpc.stub, namespace.fingerprint
    found = stub.Lookup(pb.LookupRequest(namespace=fingerprint, runs=runs), timeout=10)
    assert (found.hits[0].num_leading, found.hits[0].complete) == (0, b"")
    assert stub.Verify(pb.VerifyRequest(namespace=fingerprint, runs=runs), timeout=10).num_checked == 0
    assert stub.Remove(pb.RemoveRequest(namespace=fingerprint, runs=runs), timeout=10).num_removed == 0
    keys = [PoolKey(fingerprint, 0, name, 0) for run in guesses for name in run.block_hashes]
    assert intruder.chunks.get(keys) == [None] * len(keys)
    assert owner.lookup(namespace, [RUN], lease=False).hits[0].num_leading == len(RUN)
