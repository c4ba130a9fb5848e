"""`kvpool stats`: what it prints of a snapshot."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.commands import common
from kvpool.v1 import pool_pb2 as pb


def printed(monkeypatch: pytest.MonkeyPatch, snapshot: pb.StatsResponse) -> str:
    client = SimpleNamespace(admin=SimpleNamespace(stats=lambda: snapshot))
    monkeypatch.setattr(common, "client_of", lambda endpoint: nullcontext(client))
    return CliRunner().invoke(app, ["stats"], catch_exceptions=False).stdout


def test_lookups_and_bytes_are_those_that_the_metrics_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other servers' lookups and refused ones are no lookups of engines; not all located bytes are moved."""
    server = pb.ServerStats(
        rpc_seconds_bounds=(0.1, 1.0),
        rpcs=[
            pb.RpcStats(method="Lookup", status="OK", buckets=(40, 0, 0)),
            pb.RpcStats(method="Lookup", status="UNAVAILABLE", buckets=(0, 0, 500)),
        ],
        transfers=[
            pb.TransferStats(transport="tcp", direction=way, nbytes=nbytes)
            for way, nbytes in (("read", 9 << 20), ("write", 3 << 10))
        ],
        usage=[pb.UsageStats(model=name, loaded_bytes=1 << 20, stored_bytes=2 << 10) for name in "ab"],
    )
    name = f"{'a' * 63}.{'b' * 63}:50051"
    tier = pb.TierStats(name="peers:x", up=True, servers=[pb.TierServer(name=name, up=True, read_bytes=5)])
    snapshot = pb.StatsResponse(counters={"lookups": 30}, server=server, tiers=[tier])
    lines = printed(monkeypatch, snapshot).splitlines()
    first_cells = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert name in "".join(first_cells), "the name of a tier's server is printed whole"
    assert "lookups     30: p50 50 ms, p99 99 ms" in lines
    assert "engines     could load 2 MiB, stored 4 KiB" in lines
    assert "tcp         read 9 MiB, write 3 KiB" in lines
