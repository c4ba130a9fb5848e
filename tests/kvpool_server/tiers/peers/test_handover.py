"""A server that leaves hands blocks over to others: real servers, and a real directory."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from kvpool.client.client import Client
from kvpool.protocol.errors import DrainingError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun, ShardRange
from kvpool.security.principal import Role
from kvpool_server.tiers.peers.handover import HandOver
from kvpool_server.tiers.tier import keys_of
from tests.contracts.tier_contract import awaited
from tests.kvpool_server.tiers.peers.conftest import CHUNK, LONG, SPEC, Host, StartServer
from tests.kvpool_server.tiers.peers.test_tier import LONG_NAMES, _announced, _keys
from tests.support.directory import DirectoryProcess
from tests.support.entries import GROUP
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


def test_blocks_are_spread_over_receivers_that_have_opened_their_namespace_and_none_goes_twice(
    neighbours: Callable[..., list[Host]],
) -> None:
    leaving, *others = neighbours(",handover=1GiB", 3)
    prompts = [prompt(f"prompt {nth}") for nth in range(8)]
    for each in prompts:
        leaving.put(*each)
    spec: NamespaceSpec = namespace_spec(group_spec(chunk_bytes=CHUNK), tenant="acme")
    leaving.client.put_blocks(leaving.client.open_namespace(spec), run_of("a"), [payload("a", CHUNK)])
    drained(leaving)
    assert handed_over(leaving) == 64
    for other in others:
        assert all(each.fingerprint != spec.fingerprint() for each in other.client.admin.namespaces())
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


def test_the_prompts_used_last_are_handed_over_within_the_size(neighbours: Callable[..., list[Host]]) -> None:
    leaving, other = neighbours(f",handover={16 * CHUNK}")
    for nth in range(4):
        leaving.put(*prompt(f"prompt {nth}"))
    assert all(leaving.load(*prompt("prompt 0")))
    drained(leaving)
    assert other.read_bytes == 16 * CHUNK
    assert [all(other.load(*prompt(f"prompt {nth}"))) for nth in range(4)] == [True, False, False, True]


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
    drained(leaving, 2)
    assert handed_over(leaving) == len(names) and other.read_bytes == len(names) * CHUNK


@awaited
async def test_a_receiver_without_room_reads_no_block_twice() -> None:
    reads: list[bytes] = []

    def present() -> list[bytes]:
        """Of the last blocks that were read: the receiver evicts all when it is full."""
        return reads[len(reads) // 8 * 8 :]

    receiver: Any = SimpleNamespace(
        holds=lambda group, block_hashes: len(set(block_hashes) & set(present())),
        bring_up=lambda prompt: (reads.extend(prompt[GROUP].block_hashes[:3]), set(keys_of(GROUP, present())), 1)[1:],
    )

    async def ask(endpoint: str, question: Callable[[Any], Any]) -> Any:
        return question(receiver)

    handover = HandOver(["h:1"], 1 << 30, AsyncMock(return_value=[]), ask)
    await handover.run(iter([{GROUP: run_of(*range(64))}]))
    assert 8 < len(reads) == len(set(reads)) < 64


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


def test_a_receiver_that_does_not_answer_or_brings_nothing_up_costs_bounded_time(host: Callable[..., Host]) -> None:
    """A server without the tier is as one of an older release, which does not know what it is asked for."""
    endpoint = free_endpoint()
    tier = ("--tier", f"peers:transport=tcp,peer={endpoint}")
    without_tier, dead, other = host(), host(*tier), host(*tier)
    peers = "+".join(each.server.endpoint for each in (without_tier, dead, other))
    options = ("--tier", f"peers:transport=tcp,handover=1GiB,peer={peers}", "--log-format", "json")
    leaving = host("--listen", endpoint, *options)
    for each in (leaving, dead, other):
        wait_for(lambda each=each: all(up for up, _ in each.servers.values()), "all to answer", 60)
    for nth in range(8):
        leaving.put(*prompt(f"prompt {nth}"))
    dead.server.send_signal(signal.SIGSTOP)
    try:
        assert drained(leaving) < LONG_S
    finally:
        dead.server.send_signal(signal.SIGCONT)
    assert handed_over(leaving) == 64
    assert all(all(other.load(*prompt(f"prompt {nth}"))) for nth in range(8))


def test_a_drain_ends_at_its_deadline(neighbours: Callable[..., list[Host]]) -> None:
    leaving, other = neighbours(",handover=1GiB")
    prompts = [f"prompt {nth}" for nth in range(1_000)]
    for each in prompts:
        leaving.put(each)
    assert drained(leaving, 1.0) < LONG_S / 2
    assert 0 < handed_over(leaving) <= other.read_bytes // CHUNK < len(prompts)


# Who may ask


def test_peers_alone_have_a_server_bring_blocks_up(
    pool_server: StartServer, host: Callable[..., Host], tmp_path: Path
) -> None:
    owner = host()
    owner.put("a")
    tier = f"peers:transport=tcp,peer={owner.server.endpoint}"
    secured = SecuredServer(tmp_path, pool_server, "--memory", "64MiB", "--tier", tier)
    run = BlockRun(0, [block_hash("a")])
    with ExitStack() as stack:
        engine, peer = (stack.enter_context(secured.client(role)) for role in (Role.ENGINE_WRITE, Role.PEER))
        namespace = engine.open_namespace(SPEC)

        def is_coming(client: Client) -> int:
            found = client.rpc.lookup(namespace, [run], lease=False, here=True, bring_up=True)
            return found.retry_after_ms or found.hits[0].num_leading

        for _ in range(2):
            assert not is_coming(engine)
            time.sleep(0.25)
        wait_for(lambda: is_coming(peer), "blocks for a peer", 20)


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
        other.server.send_signal(signal.SIGCONT)
        wait_for(lambda: "blocks handed over" in leaving.server.stderr, "the end of the hand-over", 20)
        with pytest.raises(DrainingError):
            leaving.client.rpc.lookup(leaving.namespace, [run], locate=True, here=True)
    finally:
        other.server.send_signal(signal.SIGCONT)
        leaving.server.kill()
