"""Hit ratios of a trace at several capacities: of our policies, and of the references."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool_server.replay.references import REFERENCES
from kvpool_server.replay.replay import REQUESTS_PER_STEP, replay
from kvpool_server.replay.trace import Request, num_blocks


def policy_ratios(
    requests: Sequence[Request], capacities: Sequence[int], policy: str, advance: Callable[[], object]
) -> list[float]:
    """Hits over all blocks looked up, for each capacity (in blocks)."""
    total = num_blocks(requests)
    return [replay(requests, capacity, policy, advance) / total for capacity in capacities]


def reference_ratios(
    requests: Sequence[Request], capacities: Sequence[int], advance: Callable[[], object]
) -> dict[str, list[float]]:
    """As `policy_ratios`, for each of `REFERENCES`."""
    total = num_blocks(requests)
    ratios: dict[str, list[float]] = {name: [] for name in REFERENCES}
    for name, count in REFERENCES.items():
        for capacity in capacities:
            ratios[name].append(count(requests, capacity) / total)
            advance()
    return ratios


def num_steps(requests: Sequence[Request], num_capacities: int, num_policies: int) -> int:
    """How often `policy_ratios` and `reference_ratios` call `advance` for these policies and capacities."""
    steps_of_one = -(-len(requests) // REQUESTS_PER_STEP)
    return num_capacities * (num_policies * steps_of_one + len(REFERENCES))
