"""A server that leaves hands blocks over to others: real servers, and a real directory."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.client.client import Client
from kvpool.protocol.errors import DrainingError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun, ShardRange
from kvpool.security.principal import Role
from tests.kvpool_server.tiers.peers.conftest import CHUNK, LONG, SPEC, Host, StartServer
from tests.kvpool_server.tiers.peers.test_tier import LONG_NAMES, _announced, _keys
from tests.support.directory import DirectoryProcess
from tests.support.processes import free_endpoint, wait_for
from tests.support.secured_server import SecuredServer
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of

LONG_S = 30
"""A drain that ends earlier has not waited for its deadline."""


def drained(leaving: Host, deadline_s: float = LONG_S) -> float:
    """Drains a server to its end; returns how long that took, seconds."""
    began = time.monotonic()
    leaving.client.admin.drain(round(deadline_s * 1000))
    assert leaving.server.wait(deadline_s + 20) == 0
    return time.monotonic() - began


def handed_over(leaving: Host) -> int:
    """Blocks, as a server's log says."""
    (line,) = [each for each in leaving.server.stderr.splitlines() if "blocks handed over" in each]
    return int(json.loads(line)["blocks"])


def prompt(name: str, count: int = 8) -> list[str]:
    return [f"{name} {nth}" for nth in range(count)]


@pytest.fixture
def neighbours(host: Callable[..., Host]) -> Callable[..., list[Host]]:
    """Starts servers that name one another. The first one, or all, have the tier's options that are given."""

    def start(options: str, count: int = 2, all_have_them: bool = False) -> list[Host]:
        endpoints = [free_endpoint() for _ in range(count)]
        hosts = []
        for nth, endpoint in enumerate(endpoints):
            others = "+".join(each for each in endpoints if each != endpoint)
            tier = f"peers:transport=tcp,peer={others}{options if nth == 0 or all_have_them else ''}"
            hosts.append(host("--listen", endpoint, "--tier", tier, "--log-format", "json"))
        # A server that has just started may answer others later than they wait.
        for each in hosts:
            wait_for(lambda each=each: all(up for up, _ in each.servers.values()), "all to answer", 60)
        return hosts

    return start


@pytest.mark.parametrize("options", [",handover=1GiB", ""])
def test_a_leaving_server_hands_its_blocks_over_if_it_is_told_to(
    host: Callable[..., Host], directory: DirectoryProcess, by_directory: tuple[str, str], options: str
) -> None:
    flag, tier = by_directory
    leaving, other = host(flag, tier + options, "--log-format", "json"), host(*by_directory)
    first = [f"first {nth}" for nth in range(LONG)]
    leaving.put(*first)
    wait_for(lambda: all(other.load(*first)), "blocks from a server that has just started", 60)
    leaving.put(*LONG_NAMES)
    announced = _announced(first) + _announced(LONG_NAMES)
    wait_for(lambda: _keys(directory, "block") == announced, "the announcements")
    for nth in range(20):  # A stranger's.
        directory.command("ZADD", "kvpool:servers", "inf", f"stranger-{nth}")
    assert drained(leaving) < LONG_S
    assert other.load(*LONG_NAMES) == [bool(options)] * LONG
    if options:
        assert handed_over(leaving) == LONG and other.read_bytes == 2 * LONG * CHUNK
    else:
        assert "handed over" not in leaving.server.stderr


def test_blocks_are_spread_over_receivers_and_none_is_handed_over_twice(
    neighbours: Callable[..., list[Host]],
) -> None:
    leaving, *others = neighbours(",handover=1GiB", 3)
    prompts = [prompt(f"prompt {nth}") for nth in range(8)]
    for each in prompts:
        leaving.put(*each)
    drained(leaving)
    assert handed_over(leaving) == 64
    read = [other.read_bytes // CHUNK for other in others]
    assert sum(read) == 64 and min(read) >= 16
    assert all(sum(all(other.load(*each)) for other in others) for each in prompts)


def test_what_another_server_has_is_not_handed_over(neighbours: Callable[..., list[Host]]) -> None:
    leaving, first, second = neighbours(",handover=1GiB", 3)
    theirs, ours = prompt("theirs"), prompt("ours", 40)
    for names in (theirs, ours):
        leaving.put(*names)
    for names in (theirs, ours[:8]):
        wait_for(lambda names=names: all(first.load(*names)), "blocks that another server has read", 20)
    assert all(leaving.load(*ours)), "it is now the first to be handed over"
    drained(leaving)
    assert handed_over(leaving) == 32
    # The rest of a prompt goes to the server that has its beginning, which then has been given more than the other one.
    assert (first.read_bytes, second.read_bytes) == (48 * CHUNK, 0)


def test_servers_that_leave_together_leave_a_shared_prompt_to_the_one_that_stays(
    neighbours: Callable[..., list[Host]],
) -> None:
    leaving, second, third = neighbours(",handover=1GiB", 3, all_have_them=True)
    names = prompt("shared", 64)
    leaving.put(*names)
    wait_for(lambda: all(second.load(*names)), "blocks that another server has read", 20)
    for each in (leaving, second):
        each.client.admin.drain(LONG_S * 1000)
    for each in (leaving, second):
        assert each.server.wait(LONG_S + 20) == 0
    assert all(third.load(*names))


def test_a_prompt_that_is_being_continued_is_handed_over(neighbours: Callable[..., list[Host]]) -> None:
    leaving, other = neighbours(",handover=1GiB")
    names = prompt("open")
    leaving.put(*names)
    shards = ShardRange(0, leaving.namespace.group(0).num_shards)
    leaving.client.rpc.put_start(leaving.namespace, [run_of("next", parent=names[-1])], shards)
    drained(leaving, 3)
    assert handed_over(leaving) == len(names) and other.read_bytes == len(names) * CHUNK


def test_a_receiver_without_room_reads_no_block_twice(pool_server: StartServer) -> None:
    chunk, names = 64 << 10, prompt("large", 1_000)
    spec = namespace_spec(group_spec(chunk_bytes=chunk), tenant="acme")
    endpoints = [free_endpoint(), free_endpoint()]
    hosts = []
    for endpoint, other, memory, options in (
        (*endpoints, "96MiB", ",handover=1GiB"), (*endpoints[::-1], "32MiB", "")
    ):  # fmt: skip
        tier = f"peers:transport=tcp,peer={other}{options}"
        flags = ("--memory", memory, "--listen", endpoint, "--log-format", "json")
        hosts.append(Host(pool_server(*flags, "--tier", tier)))
    leaving, receiver = hosts
    for each in hosts:
        wait_for(lambda each=each: all(up for up, _ in each.servers.values()), "all to answer", 60)
        each.client.open_namespace(spec)
    blocks = [payload(name, chunk) for name in names]
    leaving.client.put_blocks(leaving.client.open_namespace(spec), run_of(*names), blocks)
    assert drained(leaving) < LONG_S
    assert receiver.read_bytes <= len(names) * chunk
    for each in hosts:
        each.close()


def test_the_prompts_used_last_are_handed_over_within_the_size(neighbours: Callable[..., list[Host]]) -> None:
    leaving, other = neighbours(f",handover={16 * CHUNK}")
    for nth in range(4):
        leaving.put(*prompt(f"prompt {nth}"))
    assert all(leaving.load(*prompt("prompt 0")))
    drained(leaving)
    assert other.read_bytes == 16 * CHUNK
    assert [all(other.load(*prompt(f"prompt {nth}"))) for nth in range(4)] == [True, False, False, True]


def test_blocks_of_all_groups_go_to_one_server(pool_server: StartServer, neighbours: Callable[..., list[Host]]) -> None:
    leaving, *others = neighbours(",handover=1GiB", 3)
    window = group_spec(chunk_bytes=CHUNK, kind="sliding_window", window_tokens=32)
    spec = namespace_spec(SPEC.groups[0], window, tenant="acme")
    namespace = leaving.client.open_namespace(spec)
    for nth in range(4):
        names = prompt(f"prompt {nth}")
        for run in (run_of(*names), run_of(*names[-2:], group_idx=1, parent=names[-3])):
            leaving.client.put_blocks(namespace, run, [payload(name, CHUNK) for name in names[-len(run) :]])
        runs = [run_of(*names), run_of(*names[-2:], group_idx=1, parent=names[-3])]
        leaving.client.release([leaving.client.lookup(namespace, runs, prefix_only=False).lease_id])
    opened = [other.client.open_namespace(spec) for other in others]
    drained(leaving)
    assert handed_over(leaving) == 40
    for nth in range(4):
        names = prompt(f"prompt {nth}")
        runs = [run_of(*names), run_of(*names[-2:], group_idx=1, parent=names[-3])]
        found = [
            [hit.num_leading for hit in other.client.lookup(each, runs, prefix_only=False).hits]
            for other, each in zip(others, opened, strict=True)
        ]
        assert sorted(found) == [[0, 0], [8, 2]]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_does_not_answer_costs_bounded_time(neighbours: Callable[..., list[Host]], number: int) -> None:
    leaving, dead, other = neighbours(",handover=1GiB", 3)
    for nth in range(8):
        leaving.put(*prompt(f"prompt {nth}"))
    dead.server.send_signal(number)
    try:
        assert drained(leaving) < LONG_S
    finally:
        dead.server.send_signal(signal.SIGCONT)
    assert handed_over(leaving) == 64
    assert all(all(other.load(*prompt(f"prompt {nth}"))) for nth in range(8))


def test_a_receiver_that_brings_nothing_up_costs_others_nothing(host: Callable[..., Host]) -> None:
    """As a server of an older release, which does not know what it is asked for."""
    endpoint = free_endpoint()
    without_tier, other = host(), host("--tier", f"peers:transport=tcp,peer={endpoint}")
    peers = f"{without_tier.server.endpoint}+{other.server.endpoint}"
    tier = f"peers:transport=tcp,handover=1GiB,peer={peers}"
    leaving = host("--listen", endpoint, "--tier", tier, "--log-format", "json")
    wait_for(lambda: all(up for up, _ in other.servers.values()), "the server to answer", 60)
    for nth in range(8):
        leaving.put(*prompt(f"prompt {nth}"))
    assert drained(leaving) < LONG_S
    assert handed_over(leaving) == 64 and other.read_bytes == 64 * CHUNK


def test_a_drain_ends_at_its_deadline(neighbours: Callable[..., list[Host]]) -> None:
    leaving, other = neighbours(",handover=1GiB")
    prompts = [f"prompt {nth}" for nth in range(1_000)]
    for each in prompts:
        leaving.put(each)
    assert drained(leaving, 1.0) < LONG_S / 2
    assert 0 < handed_over(leaving) <= other.read_bytes // CHUNK < len(prompts)


def test_a_namespace_that_a_receiver_has_not_opened_stays_closed_there(neighbours: Callable[..., list[Host]]) -> None:
    leaving, other = neighbours(",handover=1GiB")
    leaving.put(*prompt("open"))
    spec: NamespaceSpec = namespace_spec(group_spec(chunk_bytes=CHUNK), tenant="acme")
    namespace = leaving.client.open_namespace(spec)
    for nth in range(20):
        leaving.client.put_blocks(namespace, run_of(nth), [payload(nth, CHUNK)])
    drained(leaving)
    assert handed_over(leaving) == 8 and other.read_bytes == 8 * CHUNK
    assert all(each.fingerprint != spec.fingerprint for each in other.client.admin.namespaces())


# Who may ask


@pytest.mark.parametrize(("role", "count"), [(Role.PEER, 8), (Role.ROUTER, 0)])
def test_a_receiver_takes_blocks_from_peers_alone(
    pool_server: StartServer, host: Callable[..., Host], tmp_path: Path, role: Role, count: int
) -> None:
    endpoint = free_endpoint()
    tier = f"peers:transport=tcp,peer={endpoint}"
    secured = SecuredServer(tmp_path, pool_server, "--memory", "64MiB", "--tier", tier)
    engine, operator = secured.files(Role.ENGINE_WRITE), secured.client(Role.OPERATOR)
    receiver = Host(secured.server, tls=engine)
    files = secured.files(role)
    peer = f"peer={secured.server.endpoint},ca={files.ca},cert={files.cert},key={files.key}"
    leaving = host("--listen", endpoint, "--tier", f"peers:transport=tcp,handover=1GiB,{peer}", "--log-format", "json")
    leaving.put(*prompt("ours"))
    assert drained(leaving) < LONG_S
    assert handed_over(leaving) == count
    assert operator.admin.stats().tiers[0].counters["read_bytes"] == count * CHUNK
    operator.close()
    receiver.close()


def test_an_engine_makes_no_server_bring_blocks_up_as_peers_do(
    pool_server: StartServer, host: Callable[..., Host], tmp_path: Path
) -> None:
    owner = host()
    owner.put("a")
    tier = f"peers:transport=tcp,peer={owner.server.endpoint}"
    secured = SecuredServer(tmp_path, pool_server, "--memory", "64MiB", "--tier", tier)
    engine = Host(secured.server, tls=secured.files(Role.ENGINE_WRITE))
    run = BlockRun(0, [block_hash("a")])

    def is_coming(client: Host) -> int:
        found = client.client.rpc.lookup(client.namespace, [run], lease=False, here=True, bring_up=True)
        return found.retry_after_ms or found.hits[0].num_leading

    assert not is_coming(engine)
    time.sleep(0.5)
    assert not is_coming(engine)
    peer = Host(secured.server, tls=secured.files(Role.OPERATOR))
    assert is_coming(peer)
    engine.close()
    peer.close()


def test_a_leaving_server_leases_blocks_to_servers_alone(neighbours: Callable[..., list[Host]]) -> None:
    leaving, other = neighbours(",handover=1GiB")
    leaving.put("a")
    run = BlockRun(0, [block_hash("a")])
    # A lease beyond the hand-over, so that the server stays.
    with Client(dataclasses.replace(leaving.client.config, lease_ttl_ms=LONG_S * 1000)) as engine:
        engine.lookup(leaving.namespace, [run])
    other.server.send_signal(signal.SIGSTOP)  # So the hand-over takes a while.
    try:
        leaving.client.admin.drain(LONG_S * 1000)
        with pytest.raises(DrainingError):
            leaving.client.lookup(leaving.namespace, [run])
        with pytest.raises(DrainingError):
            leaving.client.rpc.lookup(leaving.namespace, [run], lease=False, here=True, bring_up=True)
        found = leaving.client.rpc.lookup(leaving.namespace, [run], locate=True, here=True)
        assert found.lease_id
        wait_for(lambda: "blocks handed over" in leaving.server.stderr, "the end of the hand-over", 20)
        with pytest.raises(DrainingError):
            leaving.client.rpc.lookup(leaving.namespace, [run], locate=True, here=True)
    finally:
        other.server.send_signal(signal.SIGCONT)
