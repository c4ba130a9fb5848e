"""How much random tests try: `make test` a little each time, `make test-all` several times that."""

import os

EFFORT = float(os.environ.get("KVPOOL_TEST_EFFORT", "1"))


def effort(count: int) -> int:
    """How many examples or schedules to try where `make test` tries `count`."""
    return max(1, round(count * EFFORT))
