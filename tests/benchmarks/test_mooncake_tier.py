"""The figures of benchmarks.cases.mooncake_tier: rates beside Mooncake's own client, and loads of prompts."""

from __future__ import annotations

import pytest

from benchmarks.cases import mooncake_tier
from benchmarks.peers.mooncake_store import mooncake_store

MIB = mooncake_tier.MIB


@pytest.mark.more
def test_both_sides_move_the_same_bytes_and_a_client_loads_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BLOCK_BYTES", (MIB,)), ("TOTAL_BYTES", 64 * MIB), ("PROMPT_BYTES", 16 * MIB)):
        monkeypatch.setattr(mooncake_tier, name, value)
    with mooncake_store(512 * MIB) as store:
        tier = f"mooncake:master={store.address},threads=2"
        rates = {row.what: row for row in mooncake_tier.measure_tier(store, {"tier": tier}, 1)}
        loads = {row.what: row.figure for row in mooncake_tier.measure_loads(store, tier, "shm", 1)}
    for ours, theirs in (("down", "put"), ("up", "get")):
        alone = rates[f"Mooncake's own client, {theirs}, blocks of 1024 KiB"].figure
        figure = rates[f"tier, {ours}, blocks of 1024 KiB"].figure
        ratio = rates[f"tier, {ours}, blocks of 1024 KiB, over Mooncake's own client"]
        assert ratio.figure.figure == pytest.approx(figure.figure / alone.figure)
        assert ratio.reach == ">= 0.7"
    prompt = "prompt of 16 MiB from the cluster"
    first = loads[f"{prompt}, until the first part is loaded, as blocks come up"]
    assert 0 < first.figure <= loads[f"{prompt}, loaded as blocks come up"].figure
