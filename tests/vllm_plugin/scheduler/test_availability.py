from __future__ import annotations

import pytest

from kvpool.protocol.types import RunHits
from vllm_plugin.model.kinds import FullAttention, Kind, SlidingWindow
from vllm_plugin.scheduler.lookups import Availability

ALL, WINDOW = FullAttention(block_tokens=16), SlidingWindow(block_tokens=16, reach_tokens=40)
NAMES = [bytes([nth]) for nth in range(6)]


def bits(*blocks: int) -> int:
    return sum(1 << block for block in blocks)


@pytest.mark.parametrize(
    ("kind", "stages", "ready", "coming"),
    [
        (ALL, [RunHits(2)], bits(0, 1), bits(0, 1)),
        (ALL, [RunHits(2, 0, 3)], bits(0, 1), bits(0, 1, 2, 3, 4)),
        (ALL, [RunHits(0, 0, 6)], 0, bits(*range(6))),
        (ALL, [RunHits(2, 0, 99)], bits(0, 1), bits(*range(6))),
        # Every stage must have a block, or be about to.
        (ALL, [RunHits(4), RunHits(2, 0, 1)], bits(0, 1), bits(0, 1, 2)),
        (ALL, [RunHits(1, 0, 3), RunHits(2, 0, 1)], bits(0), bits(0, 1, 2)),
        (ALL, [RunHits(1, 0, 5), RunHits(0)], 0, 0),
        # Bitmaps do not say which blocks are on their way.
        (ALL, [RunHits(1, bits(0, 3), 2)], bits(0, 3), bits(0, 1, 2, 3)),
        (WINDOW, [RunHits(0, bits(4), 0)], bits(4), bits(4)),
        (WINDOW, [RunHits(0, bits(4), 1)], bits(4), bits(*range(6))),
        (WINDOW, [RunHits(0, bits(4), 1), RunHits(0, bits(3, 4))], bits(4), bits(3, 4)),
    ],
)
def test_what_is_there_and_what_may_be(kind: Kind, stages: list[RunHits], ready: int, coming: int) -> None:
    stock = Availability.of(kind, 0, 6, stages)
    assert (stock.ready, stock.coming) == (ready, coming)


@pytest.mark.parametrize(
    ("hits", "missing"),
    [
        (RunHits(0), NAMES),
        (RunHits(6), []),
        (RunHits(2), NAMES[2:]),
        (RunHits(2, 0, 3), NAMES[5:]),
        (RunHits(1, bits(0, 3)), [*NAMES[1:3], *NAMES[4:]]),
    ],
)
def test_what_is_on_its_way_is_not_missing(hits: RunHits, missing: list[bytes]) -> None:
    assert list(Availability.of(ALL, 0, 6, [hits]).missing(NAMES)) == missing


def test_what_is_found_begins_where_it_was_asked_for() -> None:
    stock = Availability.of(ALL, 10, 6, [RunHits(2, 0, 3)])
    assert stock.found().leading == 12
    assert stock.promised().leading == 15
