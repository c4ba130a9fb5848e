"""The longest usable prefix, beside the rule written out block by block."""

from __future__ import annotations

import math
import random

import pytest

from kvpool.protocol.namespace import GroupSpec
from kvpool.protocol.types import BlockRun, RunHits
from kvpool_server.cache.lookups import usable_tokens
from tests.support.values import group_spec, run_of

FULL = group_spec(block_tokens=4)
WINDOW = group_spec(kind="sliding_window", block_tokens=4, window_tokens=10)
STATE = group_spec(kind="mamba", block_tokens=8)
LOCAL = group_spec(kind="chunked_local_attention", block_tokens=4)
MODELS = {
    "full": (FULL,),
    "full and window": (FULL, WINDOW),
    "full and state": (FULL, STATE),
    "full and local": (FULL, LOCAL),
    "all": (STATE, FULL, WINDOW, LOCAL),
}


def written_out(groups: tuple[GroupSpec, ...], held: list[set[int]], num_tokens: int) -> int:
    """Tokens of the longest prefix that every group has the blocks for: vLLM's rules, one boundary at a time."""
    alignment = math.lcm(*(group.block_tokens for group in groups))
    for boundary in range(num_tokens // alignment * alignment, 0, -alignment):
        for group, blocks in zip(groups, held, strict=True):
            first = 0
            if group.kind == "mamba":
                first = boundary // group.block_tokens - 1
            elif group.window_tokens:
                first = max(0, boundary - (group.window_tokens - 1)) // group.block_tokens
            if not blocks.issuperset(range(first, boundary // group.block_tokens)):
                break
        else:
            return boundary
    return 0


def _hits(blocks: set[int], count: int) -> RunHits:
    leading = next(nth for nth in range(count + 1) if nth not in blocks)
    return RunHits(leading, sum(1 << nth for nth in blocks))


@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
def test_a_hit_ends_where_every_group_has_its_blocks(groups: tuple[GroupSpec, ...]) -> None:
    chance, answers = random.Random(7), set()
    for _ in range(2_000):
        num_tokens = chance.randrange(4, 100)
        counts = [num_tokens // group.block_tokens for group in groups]
        share = chance.choice((0.7, 0.9, 1.0))
        held = [{nth for nth in range(count) if chance.random() < share} for count in counts]
        runs = [BlockRun(idx, run_of(*range(count)).block_hashes) for idx, count in enumerate(counts)]
        hits = [_hits(blocks, count) for blocks, count in zip(held, counts, strict=True)]
        answer = usable_tokens(groups, runs, hits)
        assert answer == written_out(groups, held, num_tokens)
        answers.add(answer)
    assert len(answers) > 3


def test_a_group_without_a_run_leaves_nothing_usable_and_of_several_runs_the_first_counts() -> None:
    run = run_of("a", "b")
    assert usable_tokens((FULL,), [run], [RunHits(2, 3)]) == 8
    assert usable_tokens((FULL, WINDOW), [run], [RunHits(2, 3)]) == 0
    assert usable_tokens((FULL,), [run_of("a", "b"), run_of("z")], [RunHits(1, 1), RunHits(1, 1)]) == 4
