"""The load policy beside the best choice in hindsight, from an idle engine to one with twice what it can compute."""

from __future__ import annotations

import pytest

from tests.simulation.queues import always, constant, learned, mean_ttft_s, never

LOADS = (0.1, 0.5, 0.8, 1.0, 1.25, 1.5, 2.0)
LINKS_GB_S = (0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 50.0)
"""Computing 25,000 tokens of 128 KiB a second is as fast as 3.3 GB/s."""
HIT_SHARES = (0.5, 0.9)
SHARES = (0.2, 0.4, 0.6, 0.8)
SAMPLE = {(0.5, 0.3, 0.9), (1.0, 1.0, 0.5), (1.5, 3.0, 0.9), (2.0, 10.0, 0.9), (1.25, 0.1, 0.5)}


@pytest.mark.parametrize(
    ("load", "link_gb_s", "hit_share"),
    [
        pytest.param(*point, marks=[] if point in SAMPLE else pytest.mark.more)
        for point in ((load, link, hit) for load in LOADS for link in LINKS_GB_S for hit in HIT_SHARES)
    ],
)
def test_no_fixed_choice_is_much_better(load: float, link_gb_s: float, hit_share: float) -> None:
    """Of loading always, never, or the same share of each hit, whichever was best: by 5.4 % at one point of all."""
    point = (load, link_gb_s * 1e9, hit_share)
    best = min(mean_ttft_s(policy, *point) for policy in (always, never, *map(constant, SHARES)))
    assert mean_ttft_s(learned, *point) <= 1.06 * best
