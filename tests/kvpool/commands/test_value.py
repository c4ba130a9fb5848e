"""`kvpool value`: what it prints of a server's traffic, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from kvpool.cli import main
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool_server.value.histogram import SIZES
from tests.conftest import StartServer
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import namespace_spec, payload, run_of

BLOCK_TOKENS, ROUNDS = 16, 4
TENANTS = {"acme": ["a", "b", "new"], "umbra": ["c"]}
"""Tenants, and the blocks of their prompt; `new` is never stored."""
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str, status: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["kvpool", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert (ended.value.code or 0) == status, printed
        return printed.err if status else printed.out

    return run


@pytest.fixture
def server(pool_server: StartServer) -> ServerProcess:
    """A server whose tenants have looked up three blocks and one, `ROUNDS` times."""
    server = pool_server()
    with Client(ClientConfig(server.endpoint)) as client:
        for tenant, names in TENANTS.items():
            namespace = client.open_namespace(namespace_spec(tenant=tenant))
            stored = [name for name in names if name != "new"]
            client.put_blocks(namespace, run_of(*stored), [payload(name, 256) for name in stored])
            for _ in range(ROUNDS):
                client.release([client.lookup(namespace, [run_of(*names)]).lease_id])
        expected = BLOCK_TOKENS * ROUNDS * sum(map(len, TENANTS.values()))
        wait_for(lambda: client.admin.value().curves[0].lookup_tokens == expected, "the lookups to be counted")
    return server


def test_tables_of_all_tenants_and_of_each(run: Run, server: ServerProcess) -> None:
    printed = run("value", "--endpoint", server.endpoint, "--prefill", "1000")
    assert max(map(len, printed.splitlines())) <= 80
    for title in ("all tenants", "tenant acme", "tenant umbra"):
        assert title in printed
    assert "GPU-s a day" in printed and "with tiers" not in printed
    for size in ("0.25x", "8x"):
        assert printed.count(size) == 3
    assert "policy density, hit 66.7% of them" in printed and "policy density, hit 75.0% of them" in printed


def test_one_tenant_and_no_other(run: Run, server: ServerProcess) -> None:
    printed = run("value", "--endpoint", server.endpoint, "--tenant", "umbra")
    assert "tenant umbra" in printed and "acme" not in printed and "100.0%" in printed
    refused = run("value", "--endpoint", server.endpoint, "--tenant", "nobody", status=2)
    assert "no curve of tenant 'nobody'" in refused


def test_the_json_of_a_curve(run: Run, server: ServerProcess) -> None:
    report = json.loads(run("value", "--endpoint", server.endpoint, "--json", "--prefill", "10"))
    assert report["enabled"] and [curve["tenant"] for curve in report["curves"]] == ["", "acme", "umbra"]
    total = report["curves"][0]
    assert total["is_total"] and total["hit_ratio"] == pytest.approx(0.75)
    assert [each["size"] for each in total["estimates"]] == list(SIZES)
    for each in total["estimates"]:
        assert each["arena_bytes"] == each["size"] * report["arena_bytes"]
        assert each["saved_gpu_seconds_per_day"] == pytest.approx(each["saved_tokens_per_day"] / 10)


def test_a_server_without_lookups_says_so(run: Run, pool_server: StartServer) -> None:
    idle = pool_server()
    assert "no lookups yet" in run("value", "--endpoint", idle.endpoint)
    run("value", "--prefill", "0", status=2)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_server_that_estimates_nothing_is_an_error_that_says_how_it_would(
    run: Run, pool_server: StartServer, options: list[str]
) -> None:
    off = pool_server("--value-sample", "0")
    said = run("value", "--endpoint", off.endpoint, *options, status=1)
    assert said == f"kvpool: the server at {off.endpoint} estimates no hit ratios; start it with --value-sample 8192\n"
