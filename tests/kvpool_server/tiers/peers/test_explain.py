"""What Explain says of blocks that other servers have, and to whom."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.types import BlockRun
from kvpool.security.principal import Role
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.rpc.blocks import MAX_LEASES_OF_SERVERS, MAX_OWN_LEASES
from tests.kvpool_server.tiers.peers.conftest import LONG, SPEC, Host, StartServer
from tests.support.directory import DirectoryProcess
from tests.support.processes import wait_for
from tests.support.secured_server import SecuredServer
from tests.support.values import block_hash

IN_TIER, MISSING = pb.BLOCK_STATE_IN_TIER, pb.BLOCK_STATE_MISSING
Places = list[tuple[int, pb.BlockState, str]]


def _naming(*others: Host) -> tuple[str, str]:
    return "--tier", f"peers:transport=tcp,peer={'+'.join(other.server.endpoint for other in others)}"


def _places(found: pb.ExplainResponse) -> Places:
    (run,) = found.runs
    return [(part.count, part.state, part.server) for part in run.ranges]


def _keep_busy(stack: ExitStack, owner: Host, name: str) -> None:
    """Takes all leases that the owner has for servers."""
    for _ in range(MAX_LEASES_OF_SERVERS // MAX_OWN_LEASES):
        client = stack.enter_context(Client(ClientConfig(owner.server.endpoint, timeout_ms=10_000)))
        for _ in range(MAX_OWN_LEASES):
            client.rpc.lookup(owner.namespace, [BlockRun(0, [block_hash(name)])], locate=True, here=True)


def test_the_server_that_holds_each_block_is_named_and_keeps_its_leases(host: Callable[..., Host]) -> None:
    first, second = host(), host()
    first.put("a", "b")
    second.put("c")
    reader = host(*_naming(first, second))
    held = [(2, IN_TIER, first.server.endpoint), (1, IN_TIER, second.server.endpoint), (1, MISSING, "")]
    wait_for(lambda: _places(reader.explain("a", "b", "c", "d")) == held, "an answer of both servers", 20)
    for _ in range(MAX_LEASES_OF_SERVERS + 1):  # Within the time of a lease.
        found = reader.explain("a", "b", "c", "d")
        assert _places(found) == held and not found.servers_away and not found.tiers_away
    assert all(reader.load("a", "b", "c"))
    assert reader.explain("a").runs[0].ranges[0].server == ""


def test_a_server_that_the_directory_names_and_a_dead_directory_are_named(
    host: Callable[..., Host], directory: DirectoryProcess, by_directory: tuple[str, str]
) -> None:
    owner, reader = host(*by_directory), host(*by_directory)
    names = [f"long {nth}" for nth in range(LONG)]
    owner.put(*names)
    held = [(LONG, IN_TIER, owner.server.endpoint)]
    wait_for(lambda: _places(reader.explain(*names)) == held, "the announcements", 20)
    assert reader.explain(*names).runs[0].ranges[0].tier == "peers"
    with ExitStack() as stack:
        _keep_busy(stack, owner, names[0])
        why = reader.explain(*names).servers_away[owner.server.endpoint]
        assert why.startswith("refused: ") and why.endswith("; the directory names it")
    directory.kill()
    away = f"directory {directory.endpoint}"
    wait_for(lambda: away in reader.explain(*names).servers_away, "the directory to be missed")


def test_servers_with_another_key_of_the_directory_have_another_fingerprint(
    host: Callable[..., Host], directory: DirectoryProcess, by_directory: tuple[str, str], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.touch(0o600)
    other.write_text(bytes(32).hex())
    flags = by_directory, by_directory, ("--tier", f"peers:directory={directory.url},key_file={other}")
    tiers = [host(*each).client.admin.stats().tiers[0] for each in flags]
    first, second, third = ([each.key for each in tier.servers if each.key] for tier in tiers)
    assert first == second != third and [len(key) for key in (*first, *third)] == [8, 8]
    assert not any(each.HasField("read_bytes") for tier in tiers for each in tier.servers)


def test_a_tenants_operator_learns_no_address(
    pool_server: StartServer, host: Callable[..., Host], tmp_path: Path
) -> None:
    owner = host()
    owner.put("a")
    secured = SecuredServer(tmp_path, pool_server, "--memory", "64MiB", *_naming(owner))
    with ExitStack() as stack:
        roles = (Role.OPERATOR, Role.TENANT_OPERATOR, Role.ENGINE_WRITE)
        operator, tenant, engine = (stack.enter_context(secured.client(role)) for role in roles)
        fingerprint = engine.open_namespace(SPEC).fingerprint

        def told(client: Client) -> pb.ExplainResponse:
            return client.admin.explain(fingerprint, [BlockRun(0, [block_hash("a")])], timeout_ms=10_000)

        endpoint = owner.server.endpoint
        wait_for(lambda: _places(told(operator)) == [(1, IN_TIER, endpoint)], "an answer", 20)
        assert _places(told(tenant)) == [(1, IN_TIER, "")]
        _keep_busy(stack, owner, "a")
        assert endpoint in told(operator).servers_away
        assert not told(tenant).servers_away and told(tenant).tiers_away
