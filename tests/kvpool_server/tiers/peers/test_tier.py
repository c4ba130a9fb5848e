"""Servers that read from one another: real ones, and a real directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import BusyError, ConfigError
from kvpool.protocol.types import BlockRun, in_parts
from kvpool.security.principal import Role
from kvpool.transport.mover import Movers
from kvpool.transport.segment import Segment
from kvpool_server.cache.eviction.policy import PrefixLRU
from kvpool_server.rpc.blocks import MAX_LEASES_OF_SERVERS, MAX_OWN_LEASES, SERVER_LEASE_MS
from kvpool_server.tiers.peers import directory as peers_directory
from kvpool_server.tiers.peers.tier import PeersTier
from kvpool_server.tiers.registry import parse
from kvpool_server.tiers.tier import TierContext
from tests.kvpool_server.tiers.peers.conftest import CHUNK, DEADLINE_S, LONG, SPEC, Host, StartServer
from tests.support.directory import DirectoryProcess
from tests.support.processes import wait_for
from tests.support.secured_server import SecuredServer
from tests.support.values import block_hash, group_spec
from tests.support.workers import MOVER, workers_of

LEASED = [block_hash(nth) for nth in range((64 << 20) // CHUNK)]
"""As many blocks as the memory of a test's server has room for."""


def _naming(*others: Host) -> tuple[str, str]:
    return "--tier", f"peers:transport=tcp,peer={'+'.join(other.server.endpoint for other in others)}"


def test_blocks_of_a_named_server_come_up_with_their_bytes(host: Callable[..., Host]) -> None:
    names = [f"block {nth}" for nth in range(50)]
    owner = host()
    owner.put(*names)
    other = host(*_naming(owner))
    asked, there = [*names[:25], "unknown", *names[25:]], [True] * 25 + [False] + [True] * 25
    wait_for(lambda: other.load(*asked) == there, "an answer, which a busy machine may delay beyond its deadline", 20)
    assert other.read_bytes == len(names) * CHUNK
    assert other.servers == {owner.server.endpoint: (True, len(names) * CHUNK)}
    owner.server.kill()
    assert all(other.load(*names)), "they are this server's now"
    away = {owner.server.endpoint: (False, len(names) * CHUNK)}
    wait_for(lambda: other.servers == away, "the server to notice, though nobody asks it")


def test_a_process_of_its_own_reads_and_may_end(host: Callable[..., Host]) -> None:
    owner = host()
    owner.put(*range(60))
    other = host(*_naming(owner))
    wait_for(lambda: all(other.load(*range(20))), "the server, which reads while no process does", 20)
    wait_for(lambda: workers_of(other.server, MOVER), "the process", 20)
    wait_for(lambda: all(other.load(*range(20, 40))), "the process to read", 20)
    for pid in workers_of(other.server, MOVER):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: all(other.load(*range(40, 60))), "a server that reads by itself again", 20)
    assert other.read_bytes == 60 * CHUNK


def test_a_server_goes_on_while_its_processes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel unmaps the arena first: a part of a second for each gibibyte."""
    has_gone_on, seen = threading.Event(), list[bool]()
    monkeypatch.setattr(Movers, "close", lambda self: seen.append(has_gone_on.wait(5)))

    async def close() -> None:
        with contextlib.closing(Segment.create(CHUNK)) as arena:
            tier = PeersTier("peers:x", ClientConfig("127.0.0.1:1"), [], arena=lambda: arena)
            await tier.open()
            asyncio.get_running_loop().call_later(0.1, has_gone_on.set)
            await tier.close()

    asyncio.run(close())
    assert seen == [True]


def test_a_block_that_has_left_again_is_read_again(host: Callable[..., Host]) -> None:
    """Its lease has ended, though what the server was told of it is still believed."""
    owner = host()
    owner.put("a")
    other = host(*_naming(owner), "--policy", "lru")
    assert other.load("a") == [True]
    others = [f"other {nth}" for nth in range((64 << 20) // CHUNK)]
    for at in range(0, len(others), 1_024):
        other.put(*others[at : at + 1_024])
    assert other.client.admin.stats().counters["evicted_blocks"] > 0
    assert other.load("a") == [True] and other.read_bytes == 2 * CHUNK


def test_servers_that_name_one_another_do_not_ask_in_circles(
    pool_server: StartServer, host: Callable[..., Host]
) -> None:
    first = host()
    second = host(*_naming(first))
    endpoint = first.server.endpoint
    first.server.kill()
    first.close()
    tier = f"peers:transport=tcp,peer={second.server.endpoint}"
    third = Host(pool_server("--listen", endpoint, "--memory", "64MiB", "--tier", tier))
    third.seconds_of_a_miss("nobody's")
    looked_up = third.looked_up, second.looked_up
    time.sleep(0.5)
    assert (third.looked_up, second.looked_up) == looked_up
    third.close()


def test_a_server_is_read_by_few_others_at_once(host: Callable[..., Host]) -> None:
    owner = host()
    owner.put("a")
    run, busy = BlockRun(0, [block_hash("a")]), "leases of other servers are not released yet"

    def lease(client: Client) -> int:
        found = client.rpc.lookup(owner.namespace, [run], locate=True, here=True)
        assert found.ends_at - time.monotonic() <= SERVER_LEASE_MS / 1000
        return found.lease_id

    config = ClientConfig(owner.server.endpoint, timeout_ms=10_000, lease_ttl_ms=60_000)
    with Client(config) as first, Client(config) as second, Client(config) as third:
        leases = [lease(client) for client in (first, second) for _ in range(MAX_OWN_LEASES)]
        assert len(leases) == MAX_LEASES_OF_SERVERS
        with pytest.raises(BusyError, match=busy):
            lease(third)
        assert owner.load("a") == [True], "engines are answered"
        first.release(leases[:1])
        with pytest.raises(BusyError, match=busy):
            lease(second)
        assert lease(third)


def test_a_server_that_does_not_answer_costs_one_wait(host: Callable[..., Host]) -> None:
    owner = host()
    owner.put("a")
    other = host(*_naming(owner))
    other.load("a")
    owner.server.send_signal(signal.SIGSTOP)
    try:
        assert other.seconds_of_a_miss("first") < DEADLINE_S / 2
        assert other.seconds_of_a_miss("second") < 0.5, "the server is asked again at once"
    finally:
        owner.server.send_signal(signal.SIGCONT)


# With a directory


def _announced(names: list[str]) -> int:
    tokens = SPEC.groups[0].block_tokens
    return sum(peers_directory.is_announced(block_hash(name), tokens) for name in names)


def _keys(directory: DirectoryProcess, what: str) -> int:
    return directory.command("KEYS", f"kvpool:{what}:*").count("kvpool:")


LONG_NAMES = [f"long {nth}" for nth in range(LONG)]


def test_the_directory_tells_who_has_a_prefix(
    host: Callable[..., Host], directory: DirectoryProcess, by_directory: tuple[str, str]
) -> None:
    owner, other, reader = (host(*by_directory) for _ in range(3))
    owner.put(*LONG_NAMES[: LONG // 2])
    other.put(*LONG_NAMES[LONG // 2 :])
    assert _announced(LONG_NAMES) > 3
    wait_for(lambda: _keys(directory, "block") == _announced(LONG_NAMES), "the announcements")
    assert all(reader.load(*LONG_NAMES))
    assert reader.seconds_of_a_miss("nobody's") < 1.0
    text = directory.command("KEYS", "*")
    assert not any(block_hash(name).hex()[:16] in text for name in LONG_NAMES)
    owner.client.admin.clear()
    other.client.admin.clear()
    reader.client.admin.clear()
    wait_for(lambda: not _keys(directory, "block"), "the end of the announcements")


@pytest.mark.parametrize(("kind", "held"), [("full_attention", range(12)), ("mamba", range(9, 10))])
def test_who_has_the_end_of_a_prefix_is_asked_first(directory: DirectoryProcess, kind: str, held: range) -> None:
    """Also where more servers than a question names have its beginning, and have it since later."""
    group = group_spec(kind=kind, block_tokens=peers_directory.EVERY_TOKENS)  # All its blocks are announced.
    names = [block_hash(f"{kind} {nth}") for nth in range(12)]

    async def asked_first() -> str:
        async with contextlib.AsyncExitStack() as stack:

            def server(name: str, blocks: range) -> peers_directory.Directory:
                made = peers_directory.Directory(directory.url, bytes(32), lambda: f"{name}:1")
                made.open()
                stack.push_async_callback(made.close)
                for nth in blocks:
                    made.hold(b"", 0, names[nth], is_there=True)
                return made

            async def announced(nth: int, count: int) -> None:
                async with asyncio.timeout(DEADLINE_S):
                    while len(await asker.owners(b"", 0, [names[nth]], group)) < count:
                        await asyncio.sleep(0.01)

            asker = server("asker", range(0))
            server("owner", held)
            await announced(held[-1], 1)
            for nth in range(peers_directory.MAX_OWNERS + 1):
                server(f"other-{nth}", range(2))
            await announced(1, peers_directory.MAX_OWNERS)
            async with asyncio.timeout(DEADLINE_S):
                while not (owners := await asker.owners(b"", 0, names, group)):  # The directory's answer was late.
                    await asyncio.sleep(0.01)
            return owners[0]

    assert asyncio.run(asked_first()) == "owner:1"


def test_a_directory_that_does_not_answer_costs_one_wait_and_one_that_was_emptied_is_filled_again(
    host: Callable[..., Host], directory: DirectoryProcess, by_directory: tuple[str, str]
) -> None:
    owner, reader = host(*by_directory), host(*by_directory)
    owner.put(*LONG_NAMES)
    wait_for(lambda: _keys(directory, "block"), "the announcements")
    directory.send_signal(signal.SIGSTOP)
    assert reader.seconds_of_a_miss("first") < DEADLINE_S / 2
    assert reader.seconds_of_a_miss("second") < 0.5, "a directory that does not answer is asked again at once"
    directory.kill()
    assert reader.servers[f"directory {directory.endpoint}"] == (False, 0)
    directory.start()
    wait_for(lambda: _keys(directory, "block") == _announced(LONG_NAMES), "the announcements again", 60)
    assert all(reader.load(*LONG_NAMES))


def test_what_strangers_write_to_the_directory_costs_no_other_block(
    host: Callable[..., Host], directory: DirectoryProcess, by_directory: tuple[str, str]
) -> None:
    owner, reader = host(*by_directory), host(*by_directory)
    owner.put(*LONG_NAMES)
    wait_for(lambda: _keys(directory, "block") == _announced(LONG_NAMES), "the announcements")
    with redis.Redis(port=int(directory.endpoint.rpartition(":")[2])) as stranger:
        first, second, *_ = sorted(stranger.keys("kvpool:block:*"))
        stranger.set(first, b"no set")
        stranger.zadd(second, {os.urandom(8): time.time() for _ in range(1_000)})
    wait_for(lambda: all(reader.load(*LONG_NAMES)), "the blocks of which the directory knows")
    with redis.Redis(port=int(directory.endpoint.rpartition(":")[2])) as stranger:
        for key in stranger.keys("kvpool:block:*"):
            stranger.delete(key)
            stranger.set(key, b"no set")
    assert not any(reader.load(*(f"later {nth}" for nth in range(LONG))))
    assert reader.servers[f"directory {directory.endpoint}"][0], "the directory is not asked any more"


def test_what_the_directory_has_no_room_for_is_announced_later(
    host: Callable[..., Host], directory: DirectoryProcess, by_directory: tuple[str, str]
) -> None:
    owner = host(*by_directory)
    wait_for(lambda: _keys(directory, "server"), "the server's entry")
    directory.command("CONFIG", "SET", "maxmemory", "1")
    owner.put(*LONG_NAMES)
    wait_for(lambda: owner.tier.counters["unannounced_blocks"], "the count of what was not announced")
    assert not _keys(directory, "block")
    directory.command("CONFIG", "SET", "maxmemory", "0")
    wait_for(lambda: _keys(directory, "block") == _announced(LONG_NAMES), "the announcements", 60)


def test_a_directory_cannot_send_a_server_to_strangers(
    host: Callable[..., Host], directory: DirectoryProcess, by_directory: tuple[str, str]
) -> None:
    """Who writes to the directory has no key; the owner's entry is replaced by one that names a stranger."""
    owner, stranger, reader = host(*by_directory), host(), host(*by_directory)
    stranger.put(*LONG_NAMES)
    owner.put(*LONG_NAMES)
    wait_for(lambda: _keys(directory, "server") == 2 and _keys(directory, "block"), "the announcements")
    script = (
        "for _,k in ipairs(redis.call('KEYS','kvpool:server:*'))do_"
        f"redis.call('SET',k,string.rep('x',16)..'{stranger.server.endpoint}')_end"
    )
    directory.command("EVAL", f'"{script}"'.replace("_", " ").replace(" ,k", "_,k"), "0")
    looked_up = stranger.looked_up
    reader.load(*LONG_NAMES)
    assert stranger.looked_up == looked_up
    wait_for(lambda: "without the servers' key" in reader.server.stderr, "the warning")


# With TLS


@pytest.mark.parametrize("here", [True, False])
def test_leases_of_servers_end_for_a_put_that_lacks_room(pool_server: StartServer, tmp_path: Path, here: bool) -> None:
    secured = SecuredServer(tmp_path, pool_server, "--memory", "64MiB")
    owner, run = Host(secured.server, tls=secured.files(Role.ENGINE_WRITE)), BlockRun(0, LEASED)
    for part in in_parts([run], 8_192):
        owner.client.put_blocks(owner.namespace, part[0], [bytes(CHUNK)] * len(part[0]))
    config = ClientConfig(secured.server.endpoint, timeout_ms=10_000, lease_ttl_ms=60_000, tls=secured.files(Role.PEER))
    with Client(config) as server:
        found = server.rpc.lookup(owner.namespace, [run], here=here)
        assert found.hits[0].num_leading == len(LEASED)
        assert found.ends_at - time.monotonic() <= SERVER_LEASE_MS / 1000, "as for all servers, whatever one asks for"
        owner.put("a", "b")
        assert owner.load("a", "b") == [True, True]
        assert server.release([found.lease_id]) == 0
    owner.close()


@pytest.mark.parametrize(
    ("role", "name", "is_reached"),
    [(Role.PEER, "", False), (Role.PEER, ",name=localhost", True), (Role.ROUTER, ",name=localhost", False)],
)
def test_a_peer_needs_the_role_and_its_certificate_the_given_name(
    pool_server: StartServer, host: Callable[..., Host], tmp_path: Path, role: Role, name: str, is_reached: bool
) -> None:
    """The certificate names localhost and 127.0.0.1, but not this address, by which the peer is reached."""
    secured = SecuredServer(tmp_path, pool_server, "--memory", "64MiB")
    owner = Host(secured.server, tls=secured.files(Role.ENGINE_WRITE))
    owner.put("a")
    files, endpoint = secured.files(role), f"[::ffff:127.0.0.1]:{secured.server.endpoint.rpartition(':')[2]}"
    tier = f"peers:peer={endpoint},transport=tcp,ca={files.ca},cert={files.cert},key={files.key}{name}"
    reader = host("--tier", tier)
    assert reader.load("a") == [is_reached] and reader.read_bytes == is_reached * CHUNK
    owner.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("peers:", "names no servers"),
        ("peers:peer=there", "HOST:PORT of another server"),
        ("peers:directory=redis://127.0.0.1:1/0", "needs key_file"),
        ("peers:directory=http://127.0.0.1:1,key_file={key}", "give redis://HOST:PORT/DB"),
        ("peers:peer=10.0.0.1:50051,token_file=x", "token_file x without tls"),
        ("peers:peer=10.0.0.1:50051", "is on another host"),
        ("peers:peer=127.0.0.1:1,write=back", "write=back is not possible"),
        ("peers:peer=127.0.0.1:1,key_file={key}", "give directory="),
        ("peers:peer=127.0.0.1:1,name=kvpool.svc", "name have no effect without ca"),
        ("peers:peer=127.0.0.1:2+127.0.0.1:9", "peer=127.0.0.1:9 is this server"),
        (
            "peers:peer=h:7,directory=redis://127.0.0.1:1/0,key_file={key},advertise=h:7",
            "peer=h:7 is this server",
        ),
    ],
)
def test_a_tier_that_cannot_work_is_refused(text: str, why: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(bytes(32).hex())
    with pytest.raises(ConfigError, match=why):
        asyncio.run(parse(text.format(key=key)).make(TierContext(("127.0.0.1", 9), PrefixLRU)).open())
