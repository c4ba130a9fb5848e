"""`kvpool value`: what it prints of a server's traffic, and what it refuses."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.commands import common
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.value.curve import SIZES
from tests.conftest import StartServer
from tests.kvpool.conftest import CliAt
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import namespace_spec, payload, run_of

BLOCK_TOKENS, ROUNDS = 16, 4
TENANTS = {"acme": ["a", "b", "new"], "umbra": ["c"]}
"""Tenants, and the blocks of their prompt; `new` is never stored."""


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


def test_curves_of_all_tenants_and_of_each(cli_at: CliAt, server: ServerProcess) -> None:
    cli = cli_at(server)
    printed = cli("value", "--prefill", "1000")
    assert max(map(len, printed.splitlines())) <= 80
    for title in ("all tenants", "tenant acme", "tenant umbra"):
        assert title in printed
    assert "GPU-s a day" in printed and "with tiers" not in printed
    assert printed.count("0.25x") == printed.count("8x") == 3
    assert "policy density, hit 66.7% of them" in printed and "policy density, hit 75.0% of them" in printed
    printed = cli("value", "--tenant", "umbra")
    assert "tenant umbra" in printed and "acme" not in printed and "100.0%" in printed
    assert "no curve of tenant 'nobody'" in cli.fails("value", "--tenant", "nobody", status=2)[1]
    report = json.loads(cli("value", "--json", "--prefill", "10"))
    assert report["enabled"] and [curve["tenant"] for curve in report["curves"]] == ["", "acme", "umbra"]
    total = report["curves"][0]
    assert total["is_total"] and total["hit_ratio"] == pytest.approx(0.75)
    assert [each["size"] for each in total["estimates"]] == list(SIZES)
    for each in total["estimates"]:
        assert each["arena_bytes"] == each["size"] * report["arena_bytes"]
        assert each["saved_gpu_seconds_per_day"] == pytest.approx(each["saved_tokens_per_day"] / 10)


def test_a_server_without_lookups_or_estimates_says_so(cli_at: CliAt, pool_server: StartServer) -> None:
    cli = cli_at(pool_server())
    assert "no lookups yet" in cli("value")
    cli.fails("value", "--prefill", "0", status=2)
    cli = cli_at(pool_server("--value-sample", "0"))
    for options in ([], ["--json"]):
        assert cli.fails("value", *options)[1] == (
            f"kvpool: the server at {cli.server.endpoint} estimates no hit ratios; start it with --value-sample 8192\n"
        )


@pytest.mark.parametrize(
    ("fields", "head"),
    [
        ({}, "memory|size|hits|tokens a day|GPU-s a day"),
        (
            {"has_tiers": True, "left_out": 1_234},
            "memory|size|hits|hits with tiers|tokens a day with tiers|GPU-s a day with tiers",
        ),
    ],
)
def test_columns_that_count_tiers_and_calls_that_were_left_out_are_told(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], head: str
) -> None:
    estimates = [pb.ValueEstimate(size=size, hit_ratio=0.5, hit_ratio_with_tiers=0.6) for size in SIZES]
    curve = pb.ValueCurve(lookup_tokens=1e6, hit_tokens=5e5, estimates=estimates, is_total=True)
    report = pb.ValueResponse(enabled=True, arena_bytes=1 << 30, seconds=7_200, curves=[curve], **fields)
    client = SimpleNamespace(admin=SimpleNamespace(value=lambda: report))
    monkeypatch.setattr(common, "client_of", lambda endpoint: nullcontext(client))
    printed = CliRunner().invoke(app, ["value", "--prefill", "8000"]).stdout
    cells = [line.strip("┃").split("┃") for line in printed.splitlines() if line.startswith("┃")]
    assert "|".join(" ".join(" ".join(words).split()) for words in zip(*cells, strict=True)) == head
    assert ("1,234 lookups and puts came too fast and were left out" in printed) is bool(fields)
