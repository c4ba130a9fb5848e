"""The cheapest memory, disk and GPUs, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.advice import GIB, Demand, Prices, choose, load_prices, options
from kvpool.errors import InvalidRequestError

DEMAND = Demand(100_000.0, [(64 * GIB, 0.2), (128 * GIB, 0.4), (1024 * GIB, 0.41)], 0.01)


def test_memory_is_bought_while_it_saves_more_than_it_costs() -> None:
    best = choose(options(DEMAND, Prices(disk_hit_value=0.0)))
    assert (best.memory_bytes, best.disk_bytes) == (128 * GIB, 0)
    dear = choose(options(DEMAND, Prices(dram_gib_month=1_000.0, disk_gib_month=1_000.0)))
    assert dear.memory_bytes == 64 * GIB and dear.saved_month < 0


def test_a_target_is_reached_at_the_least_cost_or_refused() -> None:
    found = options(DEMAND, Prices(disk_hit_value=0.0))
    assert choose(found, target_hit_ratio=0.405).hit_ratio >= 0.405
    with pytest.raises(InvalidRequestError, match=r"at most 41\.0% of tokens hit"):
        choose(found, target_hit_ratio=0.9)
    with pytest.raises(InvalidRequestError, match="no traffic"):
        choose([])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gpu_hours = 2", "unknown key 'gpu_hours'; choose"),
        ("gpu_hour = -1", "price gpu_hour = -1 is not a number"),
        ("gpu_hour = true", "price gpu_hour = True"),
        ("peak = 0.5", "from 1 to 100"),
        ("prefill_tokens_per_s = nan", "price prefill_tokens_per_s = nan"),
        ("gpu_hour = ", "cannot read the prices"),
        ("peak = " + "[" * 60_000, "cannot read the prices .*recursion"),
        ("#" * 65_537, "the file has more than 64 KiB"),
        ("gpu_hour = [" + "1," * 10_000 + "]", r"price gpu_hour = \[[1, ]{,39} is not a number"),
    ],
)
def test_prices_that_are_none_are_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=why):
        load_prices(path)
