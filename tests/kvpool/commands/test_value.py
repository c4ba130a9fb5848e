"""`kvpool value` and `kvpool advise`: what they print of a server's traffic and of traces, and what they refuse."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.cli import main
from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.value import SIZES
from kvpool_server.replay.replay import make_pool, put
from kvpool_server.value.recorder import Recorder
from tests.conftest import StartServer
from tests.support.clock import FakeClock
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
    server = pool_server("--value-sample", "640")
    with Client(ClientConfig(server.endpoint)) as client:
        for tenant, names in TENANTS.items():
            namespace = client.open_namespace(namespace_spec(tenant=tenant))
            stored = [name for name in names if name != "new"]
            client.put_blocks(namespace, run_of(*stored), [payload(name, 256) for name in stored])
            for _ in range(ROUNDS):
                client.release([client.lookup(namespace, [run_of(*names)]).lease_id])
        expected = BLOCK_TOKENS * ROUNDS * sum(map(len, TENANTS.values()))
        wait_for(lambda: client.admin.value().curves[0].lookup_tokens == expected, "the lookups to be simulated")
    return server


def trace_of(path: Path, seconds: int = 600) -> Path:
    """JSON lines of prompts that come again after ten others."""
    lines = []
    for nth in range(seconds + 1):
        ids = [nth % 10 * 4 + depth for depth in range(4)]
        lines.append({"timestamp": 1_000 * nth, "input_length": 2_048, "output_length": 1, "hash_ids": ids})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recording(path: Path) -> Path:
    clock = FakeClock()
    pool, fingerprint = make_pool(64, "lru", clock)
    recorder = Recorder(str(path), 1 << 20, clock=clock)
    pool.observe_traffic(recorder)
    for nth in range(100):
        prompt = run_of(*((nth % 20, depth) for depth in range(4)))
        found = pool.lookup(fingerprint, [prompt], prefix_only=True, lease_ttl_ms=1_000)
        put(pool, fingerprint, prompt)
        pool.release([found.lease_id])
        clock.advance(1.0)
    recorder.close()
    return path


def test_tables_of_all_tenants_and_of_each(run: Run, server: ServerProcess) -> None:
    printed = run("value", "--endpoint", server.endpoint, "--prefill", "1000")
    assert max(map(len, printed.splitlines())) <= 80
    for title in ("all tenants", "tenant acme", "tenant umbra"):
        assert title in printed
    assert "GPU-s a day" in printed and "off by" in printed and "with tiers" not in printed
    for size in ("0.25x", "8x"):
        assert printed.count(size) == 3
    assert "The pool hit 66.7% of them" in printed and "The pool hit 75.0% of them" in printed


def test_one_tenant_and_no_other(run: Run, server: ServerProcess) -> None:
    printed = run("value", "--endpoint", server.endpoint, "--tenant", "umbra")
    assert "tenant umbra" in printed and "acme" not in printed and "100.0%" in printed
    refused = run("value", "--endpoint", server.endpoint, "--tenant", "nobody", status=1)
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
        assert 0.01 <= each["uncertainty"] <= total["uncertainty"] <= 1


def test_a_server_without_lookups_or_simulation_says_so(run: Run, pool_server: StartServer) -> None:
    idle = pool_server("--value-sample", "640")
    assert "no lookups yet" in run("value", "--endpoint", idle.endpoint)
    assert "no lookups yet" in run("advise", "--live", "--endpoint", idle.endpoint, status=1)


def test_a_server_that_simulates_nothing_says_how_it_would(run: Run, pool_server: StartServer) -> None:
    off = pool_server()
    assert "start it with --value-sample 640" in run("value", "--endpoint", off.endpoint)
    assert not json.loads(run("value", "--endpoint", off.endpoint, "--json"))["enabled"]
    assert "start it with --value-sample 640" in run("advise", "--live", "--endpoint", off.endpoint, status=1)


def test_advice_for_a_live_server(run: Run, server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "s of traffic; wait for 60 s" in run("advise", "--live", "--endpoint", server.endpoint, status=1)
    monkeypatch.setattr("kvpool.commands.advise.MIN_TRAFFIC_S", 0.0)
    printed = run("advise", "--live", "--endpoint", server.endpoint)
    assert "->" in printed and "hit 75.0% of" in printed and "no provider has: give yours with --prices FILE" in printed
    found = json.loads(run("advise", "--live", "--endpoint", server.endpoint, "--json"))
    assert found["chosen"] in found["options"] and found["hit_ratio_uncertainty"] >= 0.01


def test_advice_for_json_lines(run: Run, tmp_path: Path) -> None:
    trace, prices = trace_of(tmp_path / "trace.jsonl"), tmp_path / "prices.toml"
    prices.write_text("gpu_hour = 4.0\n")
    asked = ("advise", str(trace), "--kv-bytes-per-token", "1024", "--prices", str(prices))
    printed = run(*asked, "--target-hit-ratio", "0.9")
    assert "Your prices" in printed and "a GPU 4 an hour" in printed
    found = json.loads(run(*asked, "--target-hit-ratio", "0.9", "--json"))
    # Ten prompts of four blocks of 512 tokens: all of them fit 40 blocks, and the first ten lookups miss.
    assert found["chosen"]["hit_ratio"] == pytest.approx(591 / 601, abs=0.02)
    assert found["tokens_per_s"] == pytest.approx(601 * 4 * 512 / 600)
    assert "at most 98.3% of tokens hit" in run(*asked, "--target-hit-ratio", "1", status=1)


def test_advice_for_a_recording_needs_no_size_of_blocks(run: Run, tmp_path: Path) -> None:
    found = json.loads(run("advise", str(recording(tmp_path / "recording.gz")), "--json"))
    assert max(option["hit_ratio"] for option in found["options"]) == pytest.approx(0.8, abs=0.02)


def test_advice_refuses_what_it_cannot_use(run: Run, tmp_path: Path) -> None:
    trace = str(trace_of(tmp_path / "trace.jsonl"))
    short = str(trace_of(tmp_path / "short.jsonl", seconds=5))
    broken, empty = tmp_path / "broken.gz", tmp_path / "empty.jsonl"
    broken.write_bytes(gzip.compress(b"{}\n"))
    empty.write_text("")
    prices = tmp_path / "prices.toml"
    prices.write_text("gpu_hours = 1\n")
    for told, *arguments in (
        ("give either a TRACE or --live",),
        ("give either a TRACE or --live", trace, "--live"),
        ("give --kv-bytes-per-token", trace),
        ("covers 5 s; give one of 60 s", short, "--kv-bytes-per-token", "1024"),
        ("unknown key 'gpu_hours'", trace, "--prices", str(prices)),
        ("cannot read the prices", trace, "--prices", str(tmp_path / "none.toml")),
        ("no blocks that were looked up", str(empty), "--kv-bytes-per-token", "1024"),
        ("is no line of a recording", str(broken)),
    ):
        assert told in " ".join(run("advise", *arguments, status=1).split())
    for wrong in (
        (str(tmp_path / "none.jsonl"),),
        (trace, "--target-hit-ratio", "1.5"),
        (trace, "--kv-bytes-per-token", "0"),
        (trace, "--block-tokens", "0"),
    ):
        run("advise", *wrong, status=2)
    run("value", "--prefill", "0", status=2)
