"""What one identity may have at once, over all of its connections: who takes all they can leave others theirs."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.client.admin import InlineChunks
from kvpool.client.client import Client, Namespace
from kvpool.protocol import wire
from kvpool.protocol.errors import BusyError, ConfigError, KVPoolError, PoolTimeoutError, UnavailableError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.messages import MESSAGE_BYTES
from kvpool.protocol.types import Chunk, PoolKey, ShardRange
from kvpool.security.principal import Principal, Role
from kvpool.transport.base import Local, Transfer
from kvpool.transport.tcp import TcpTransport
from kvpool.transport.tcp_connection import Peer
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.caller import CALLER
from kvpool_server.access.control import identity_limits
from kvpool_server.data_plane.admission import SPARED_S
from kvpool_server.rpc import buffers
from kvpool_server.rpc.buffers import Inbox
from kvpool_server.sharing import IdentityLimits, fair_slots
from tests.security.conftest import Deploy, Deployment
from tests.support.processes import wait_for
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of

BLOCK_BYTES = 256
ACME = "spiffe://kvpool.local/kvpool/acme/engine-write"
SMALL = "leases=4,leased_blocks=12,tickets=3,streams=2,connections=2"
TIMEOUT_S = 10.0


DOCUMENT = Path(__file__).parents[2] / "docs" / "explanation" / "security.md"


# The option


def test_the_page_tells_the_limits() -> None:
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| ([\d,]+)\b", DOCUMENT.read_text(), re.MULTILINE)
    assert {key: int(value.replace(",", "")) for key, value in rows} == dataclasses.asdict(IdentityLimits())
    (own,) = re.findall(r"^\| streams of payload \| \| (\d+) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert int(own) == buffers.MAX_OWN_DATA_STREAMS


def test_limits_are_of_all_identities_and_of_some() -> None:
    limits_of = identity_limits(["leases=5", f"{ACME},tickets=7"], "kvpool.local")
    assert limits_of("spiffe://kvpool.local/kvpool/umbra/engine-write") == IdentityLimits(leases=5)
    assert limits_of(ACME) == IdentityLimits(leases=5, tickets=7)
    assert identity_limits([], None)(ACME) == IdentityLimits()
    for name in ("", f"{ACME},"):
        with pytest.raises(ConfigError, match="have limits already"):
            identity_limits([f"{name}leases=5", f"{name}tickets=5"], None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("leases=0", "leases=0; give a whole number"),
        ("leases=5,leases=6", "leases is given twice"),
        ("leases=1.5", "leases=1.5; give a whole number"),
        (f"leases={(1 << 32) + 1}", "give a whole number, 1 to 4294967296"),
        ("acme,leases=5", "'acme' is not spiffe://"),
        (ACME, "no limit; give at least one"),
        (
            f"{ACME},leases=5,nope=5",
            "unknown limit 'nope'; the limits are leases, leased_blocks, tickets, streams, con",
        ),
        ("spiffe://kvpool.local/kvpool/acme/metrics,leases=5", "role metrics belongs to no tenant"),
        ("spiffe://other/kvpool/acme/engine-read,leases=5", "can be no caller: .*; give spiffe://kvpool.local/kvpool/"),
    ],
)
def test_a_limit_that_cannot_be_used_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"^--limit {re.escape(text)}: .*{told}"):
        identity_limits([text], "kvpool.local")


# A server


class Limited:
    """A server with small limits, and a namespace with eight blocks of each of two tenants."""

    def __init__(self, deployment: Deployment):
        self.deployment = deployment
        self._stack = ExitStack()
        self._held: list[tuple[str, int]] = []
        self.namespaces = {tenant: self._fill(tenant) for tenant in ("acme", "umbra")}

    def client(self, tenant: str) -> Client:
        """A client with a connection of its own, until the end of the test."""
        client = self.deployment.client(Role.ENGINE_WRITE, tenant, transport="grpc")
        return self._stack.enter_context(client)

    def _fill(self, tenant: str) -> Namespace:
        client = self.client(tenant)
        namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES), tenant=tenant))
        client.put_blocks(namespace, run_of(*range(8)), [payload(name, BLOCK_BYTES) for name in range(8)])
        return namespace

    def lease(self, client: Client, tenant: str, count: int = 1) -> int:
        """A lease on so many blocks; 0 if it was refused."""
        runs = wire.encode_runs([run_of(*range(count))])
        request = pb.LookupRequest(namespace=self.namespaces[tenant].fingerprint, runs=runs, lease_ttl_ms=60_000)
        found = client.rpc.stub.Lookup(request, timeout=TIMEOUT_S)
        assert found.hits[0].num_leading == count
        self._held.append((tenant, int(found.lease_id)))
        return int(found.lease_id)

    def put(self, client: Client, tenant: str, name: object) -> int:
        """A ticket on a block. Raises OutOfSpaceError."""
        ticket_id = client.rpc.put_start(self.namespaces[tenant], [run_of(name)], ShardRange(0, 1)).ticket_id
        self._held.append((tenant, ticket_id))
        return ticket_id

    def end(self) -> None:
        """Ends all leases, tickets and clients."""
        for tenant in self.namespaces:
            client = self.client(tenant)
            mine = [hold_id for whose, hold_id in self._held if whose == tenant]
            client.release(mine)
            for hold_id in mine:
                client.rpc.put_revoke(hold_id)
        self._held.clear()
        self._stack.close()


@pytest.fixture(scope="module")
def _server(deploy: Deploy) -> Limited:
    return Limited(deploy("--limit", SMALL, "--data-workers", "1"))


@pytest.fixture
def limited(_server: Limited) -> Iterator[Limited]:
    try:
        yield _server
    finally:
        _server.end()


def test_an_identity_has_as_many_leases_as_its_limit_over_all_connections(limited: Limited) -> None:
    first, second, other = limited.client("acme"), limited.client("acme"), limited.client("umbra")
    leases = [limited.lease(client, "acme") for client in (first, second) * 3]
    assert [lease_id > 0 for lease_id in leases] == [True] * 4 + [False] * 2
    assert limited.lease(other, "umbra")
    assert first.release([leases[1]]) == 1, "another connection's, of the same identity"
    assert limited.lease(second, "acme")


def test_an_identity_has_as_many_leased_blocks_as_its_limit(limited: Limited) -> None:
    client = limited.client("acme")
    assert limited.lease(client, "acme", 8) and not limited.lease(client, "acme", 5), "12 at most"
    assert limited.lease(client, "acme", 4) and limited.lease(limited.client("umbra"), "umbra", 8)


def test_an_identity_has_as_many_tickets_as_its_limit(limited: Limited) -> None:
    put = limited.put
    first, second, other = limited.client("acme"), limited.client("acme"), limited.client("umbra")
    tickets = [put(client, "acme", f"new {nth}") for nth, client in enumerate((first, second, first))]
    with pytest.raises(KVPoolError, match=f"3 puts of {ACME} are under way"):
        put(second, "acme", "one more")
    content = payload("inline", BLOCK_BYTES).tobytes()
    key = PoolKey(limited.namespaces["acme"].fingerprint, 0, block_hash("inline"), 0)
    with pytest.raises(KVPoolError, match=f"3 puts of {ACME} are under way"):
        InlineChunks(first.rpc).put([Chunk(key, content, checksum(content))])
    # The log names the caller, and not each of its calls.
    assert limited.deployment.server.stderr.count("refused a call beyond a limit") == 1
    assert re.search(f"beyond a limit.*{ACME}", limited.deployment.server.stderr)
    assert put(other, "umbra", "new")
    assert second.rpc.put_revoke(tickets[0])
    assert put(second, "acme", "one more")


class Stream:
    """A LookupStream call."""

    def __init__(self, client: Client, request: pb.LookupRequest):
        self._requests: queue.SimpleQueue[pb.LookupRequest | None] = queue.SimpleQueue()
        self._request = request
        self._replies = client.rpc.stub.LookupStream(iter(self._requests.get, None), timeout=60)

    def is_answered(self) -> bool:
        """False if the server has ended the call."""
        self._requests.put(self._request)
        return next(self._replies, None) is not None

    def close(self) -> None:
        self._requests.put(None)
        self._replies.cancel()


def test_an_identitys_streams_make_way_for_its_own_alone(limited: Limited) -> None:
    def begun(tenant: str) -> Stream:
        runs = wire.encode_runs([run_of(0)])
        stream = Stream(
            limited.client(tenant), pb.LookupRequest(namespace=limited.namespaces[tenant].fingerprint, runs=runs)
        )
        assert stream.is_answered()
        return stream

    streams = [begun("umbra"), *(begun("acme") for _ in range(4))]
    assert [stream.is_answered() for stream in streams] == [True, False, False, True, True]
    for stream in streams:
        stream.close()


def test_an_identitys_connections_to_the_data_port_leave_others_theirs(limited: Limited) -> None:
    with ExitStack() as stack:

        def reader(tenant: str) -> Callable[[], bool]:
            """Reads a block over a connection of its own; False: all that the identity may have are busy."""
            client, namespace = limited.client(tenant), limited.namespaces[tenant]
            lease_id = limited.lease(client, tenant)
            located = next(client.rpc.locate(namespace, lease_id, [[run_of(0)]], ShardRange(0, 1)))
            port = client.rpc.ping().data_port
            peer = Peer("127.0.0.1", port.port, port.nonce, TIMEOUT_S, sealed=True)
            transport = stack.enter_context(closing(TcpTransport(peer, 1)))
            transfer = Transfer(lease_id, list(located.offsets), BLOCK_BYTES, TIMEOUT_S, permit=located.permit)

            def reads() -> bool:
                try:
                    transport.read(transfer, Local(rows=[[np.empty(BLOCK_BYTES, np.uint8)]]))
                except UnavailableError:
                    return False
                return True

            return reads

        other, first, second, third = (reader(tenant) for tenant in ("umbra", "acme", "acme", "acme"))
        assert other()

        def finds_all_busy() -> bool:
            """Whether a third connection is refused; not if the machine paused until the others were idle."""
            asked_at = time.monotonic()
            assert first() and second()
            is_read = third()
            assert not is_read or time.monotonic() - asked_at > SPARED_S, "the others have just moved bytes"
            return not is_read

        wait_for(finds_all_busy, "a refusal")
        time.sleep(SPARED_S)
        assert third() and other()


# Streams of data


def test_an_identity_has_so_many_streams_of_data_and_so_many_waiting_and_leaves_others_theirs() -> None:
    most = buffers.MAX_OWN_DATA_STREAMS + buffers.MAX_OWN_DATA_WAITING
    context: Any = SimpleNamespace(time_remaining=lambda: 60.0)

    async def run() -> None:
        box, entered = Inbox(), list[str]()

        async def hold(tenant: str) -> None:
            CALLER.set(Principal(tenant, Role.ENGINE_WRITE))
            async with box.slot(context):
                entered.append(tenant)
                await asyncio.sleep(60)

        calls = [asyncio.create_task(hold("acme")) for _ in range(most + 8)]
        async with asyncio.timeout(TIMEOUT_S):
            while sum(call.done() for call in calls) < 8:
                await asyncio.sleep(0)
            calls.append(asyncio.create_task(hold("umbra")))
            while "umbra" not in entered:
                await asyncio.sleep(0)
        assert entered == ["acme"] * buffers.MAX_OWN_DATA_STREAMS + ["umbra"]
        assert all(isinstance(call.exception(), BusyError) for call in calls[most:-1])
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(run())


class SilentContext:
    """Of a call whose client sends some messages, and then nothing."""

    def __init__(self, *messages: bytes):
        self._messages = list(messages)

    def time_remaining(self) -> float:
        return 60.0

    async def read(self) -> bytes:
        if not self._messages:
            await asyncio.sleep(60)
            raise AssertionError("the test has taken a minute")
        return self._messages.pop(0)


def _called_by(tenant: str, what: Callable[[], Any]) -> asyncio.Task[Any]:
    async def call() -> Any:
        CALLER.set(Principal(tenant, Role.ENGINE_WRITE))
        return await what()

    return asyncio.create_task(call())


@pytest.mark.parametrize("what", ["streams", "pieces"])
def test_calls_that_identities_leave_silent_give_way(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_slots, "SPARED_S", 0.2)
    piece, first = bytes(MESSAGE_BYTES), b"first"

    async def run() -> None:
        box, silent = Inbox(), list[asyncio.Task[Any]]()

        async def read(*messages: bytes) -> bytes:
            context: Any = SilentContext(*messages)
            if what == "pieces":
                return await box.receive(context, buffers.MAX_REQUEST_BYTES)
            async with aclosing(box.stream(context)) as stream:
                return await anext(stream)

        for nth in range(buffers.MAX_DATA_STREAMS + 1):
            sent = [piece] * (what == "pieces")
            silent += [_called_by(f"silent-{nth}", lambda sent=sent: read(*sent)) for _ in range(2)]
        await asyncio.sleep(0)
        other = _called_by("other", lambda: read(*([piece, first] if what == "pieces" else [first])))
        async with asyncio.timeout(TIMEOUT_S):
            assert (await other).endswith(first)
        ended = [call for call in silent if call.done()]
        assert ended and all(isinstance(call.exception(), PoolTimeoutError) for call in ended)
        for call in silent:
            call.cancel()
        await asyncio.gather(*silent, return_exceptions=True)

    asyncio.run(run())
