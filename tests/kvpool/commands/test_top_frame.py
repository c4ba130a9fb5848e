from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from kvpool.commands.top import MAX_ROWS, Interval, View, frame
from kvpool.v1 import pool_pb2 as pb
from tests.support.values import replaced

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
HOSTILE = "[/bold]\x1b[2J[red]\nx"


def drawn(view: View, width: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False, highlight=False).print(frame(view))
    return out.getvalue().splitlines()


def line(lines: list[str], label: str) -> str:
    (found,) = (each for each in lines if each.startswith(label))
    return found


def snapshot(scale: int, boot: int = 1, uptime_s: float = 100.0) -> pb.StatsResponse:
    server = pb.ServerStats(
        version="1",
        uptime_seconds=uptime_s,
        rpc_seconds_bounds=(0.1,),
        rpcs=(
            pb.RpcStats(method="Lookup", status="OK", sum_seconds=scale * 0.01, buckets=(10 * scale, 0)),
            pb.RpcStats(method="Lookup", status="UNAVAILABLE", sum_seconds=scale, buckets=(0, 90 * scale)),
        ),
        transfers=(pb.TransferStats(transport="tcp", direction="read", nbytes=1_000 * scale),),
        usage=(
            pb.UsageStats(
                tenant="t",
                model="m",
                lookup_tokens=100 * scale,
                hit_tokens=60 * scale,
                stored_bytes=7 * scale,
                loaded_bytes=5 * scale,
                held_bytes=42,
            ),
        ),
    )
    counters = {"evicted_blocks": 3 * scale, "lookups": 10 * scale}
    return pb.StatsResponse(counters=counters, server=server, boot_token=boot)


def busy() -> Interval:
    before, now = snapshot(1), snapshot(3)
    now = replaced(
        now,
        arena_bytes=100 << 30,
        free_bytes=60 << 30,
        prefaulted_bytes=100 << 30,
        num_entries=1_234_567,
        num_leases=3,
        tiers=(
            pb.TierStats(name="file:/x", size_bytes=1 << 40, used_bytes=1 << 39, up=True),
            pb.TierStats(name="mooncake:m", up=False),
            pb.TierStats(
                name="peers:d", up=True, servers=[pb.TierServer(name="h:2", up=True), pb.TierServer(name="h:3")]
            ),
        ),
    )
    return Interval.of(before, now, 2.0)


def test_a_frame_says_what_the_pool_does_now() -> None:
    lines = drawn(View("h:1", busy()))
    assert lines[0] == "kvpool-server 1 at h:1, up for 100 s"
    assert "40 GiB of 100 GiB" in line(lines, "memory") and line(lines, "memory").count("█") == 12
    assert "1.23 M entries, 3 leases, 0 tickets, 3 evicted/s" in line(lines, "blocks")
    assert "60.0% of 100 tokens/s; 60.0% since the start" in line(lines, "hit ratio")
    assert "10/s, p50 50 ms, p99 99 ms" in line(lines, "lookups")
    assert "read     1 kB/s" in line(lines, "tcp")
    # Engines may decline what they could load, and ranks read what other ranks read: no difference of the two is told.
    assert line(lines, "engines").split() == ["engines", "could", "load", "5", "B/s", "stored", "7", "B/s"]
    tiers = [each for each in lines if each.startswith("tier")]
    assert "512 GiB of 1 TiB: file:/x" in tiers[0] and "DOWN: mooncake:m" in tiers[1]
    assert "no answer: h:3: peers:d" in tiers[2]
    assert any(each.startswith("ERROR   tier mooncake:m: the tier failed") for each in lines)
    assert max(map(len, lines)) <= 80


def test_a_frame_lists_models_tenants_and_engines() -> None:
    interval = busy()
    engines = (
        pb.EngineState(engine="host:7", version="1", vllm_version="0.32.0", transport="shm", age_seconds=3.0),
        pb.EngineState(
            engine="host:8", version="2", vllm_version="0.33.0", transport="", breaker_open=True, age_seconds=40.0
        ),
    )
    lines = drawn(View("h:1", dataclasses.replace(interval, now=replaced(interval.now, engines=engines))))
    row = line(lines, "m ")
    assert [*row.split()] == ["m", "t", "60.0%", "100", "5", "B/s", "7", "B/s", "42", "B"]
    assert "shm" in line(lines, "host:7") and "closed" in line(lines, "host:7") and "3 s ago" in line(lines, "host:7")
    assert "OPEN" in line(lines, "host:8") and "0.33.0" in line(lines, "host:8")


@pytest.mark.parametrize("width", [80, 120])
def test_long_names_of_models_are_folded_and_shown_whole(width: int) -> None:
    interval = busy()
    bytes_moved = {"loaded_bytes": 474_000_000, "stored_bytes": 4_740_000}
    usage = pb.UsageStats(tenant="default-tenant", model=LLAMA, lookup_tokens=200_000, **bytes_moved)
    now = replaced(interval.now, server=replaced(interval.now.server, usage=(usage,)))
    lines = drawn(View("h:1", dataclasses.replace(interval, now=now)), width)
    first = next(nth for nth, each in enumerate(lines) if each.startswith("meta-llama/"))
    shown = lines[first].split()[0]
    assert (shown if width == 120 else shown + lines[first + 1].split()[0]) == LLAMA
    assert "default" in lines[first] and max(map(len, lines)) <= width


def test_a_server_that_is_away_keeps_its_last_numbers() -> None:
    lines = drawn(View("h:1", busy(), trouble="cannot reach it", silent_s=12.0))
    assert lines[1] == "away for 12 s: cannot reach it; these are its last numbers" and line(lines, "memory")
    assert drawn(View("h:1")) == ["waiting for kvpool-server at h:1"], "no answer so far"
    assert drawn(View("h:1", trouble="cannot reach it")) == ["cannot reach it"]


def test_after_a_restart_which_is_said_the_rates_are_those_since_the_start() -> None:
    interval = Interval.of(snapshot(100), snapshot(1, boot=2, uptime_s=0.5), 10.0)
    assert interval.restarted and interval.seconds == 0.5
    assert "the server has restarted: counts are those since its start" in drawn(View("h:1", interval))
    assert interval.count("evicted_blocks") == 3
    assert interval.count("lookups") == 10 == sum(interval.server.rpcs[0].buckets)
    assert interval.server.transfers[0].nbytes == 1_000
    assert interval.server.usage[0].lookup_tokens == 100
    back = Interval.of(snapshot(100), snapshot(1), 1.0)  # Counts that go back are no negative rates.
    assert back.count("evicted_blocks") == back.server.transfers[0].nbytes == back.server.usage[0].lookup_tokens == 0


def test_names_of_others_change_nothing_but_themselves() -> None:
    interval = busy()
    server = interval.now.server
    now = replaced(
        interval.now,
        tiers=(pb.TierStats(name=HOSTILE, up=True),),
        engines=(pb.EngineState(engine=HOSTILE, version=HOSTILE, vllm_version=HOSTILE, transport=HOSTILE),),
        server=replaced(
            server,
            version=HOSTILE,
            usage=tuple(pb.UsageStats(tenant=f"{HOSTILE}{nth}", model=HOSTILE) for nth in range(50)),
        ),
    )
    lines = drawn(View(f"h:{HOSTILE}", dataclasses.replace(interval, now=now), trouble=HOSTILE))
    text = "\n".join(lines)
    assert "\x1b" not in text and "[/bold][2J[red]x" in lines[0]
    assert f"and {50 - MAX_ROWS} more" in text
    assert max(map(len, lines)) <= 80
