"""What has a change cost in one domain? Lookups, puts and gets through shared memory, of two checkouts in turn.

Each side is a client process with a server of its own, both from the side's checkout, which is first on their Python
path. The sides take turns. Both run with the packages of this checkout's environment.

The side that starts first is slower by some percent: its arena gets the kernel's scattered free pages, and the second
side's arena gets whole ranges. Each start also draws its own addresses and hash seeds. So both sides start many times,
in alternating order, and the noise of a ratio is that of pairs of starts.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Protocol

import typer

from benchmarks.cases import commit_side
from benchmarks.harness.measuring import Estimate, Row, alternate, at_least, estimate, ms, process, report

ROOT = Path(__file__).parents[2]
SHARE = 0.97
THIS, OTHER = "this commit", "the other"
MEASURES = {
    "lookup": "lookups of 64 blocks, each with a release that is waited for",
    "lookup of an engine": "lookups of 64 blocks, each with a release that nobody waits for",
    "put": "put of 64 MiB in blocks of 2 MiB",
    "small put": "put of 64 blocks of 64 bytes",
    "get": "get of 64 MiB in blocks of 2 MiB",
}


class Side:
    """One checkout's client and server.

    Args:
        stack: ends them.
        root: of the checkout.
    """

    def __init__(self, stack: ExitStack, root: Path):
        command = [sys.executable, str(root / Path(commit_side.__file__).relative_to(ROOT))]
        environ = {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
        self._process = stack.enter_context(process(command, environ, stdin=subprocess.PIPE))
        self._ask("ready")

    def seconds(self, measure: str) -> float:
        """What one measure takes."""
        return float(self._ask(measure))

    def _ask(self, question: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"a side ended with status {self._process.wait()} when asked for {question!r}")
        return answer


class Timed(Protocol):
    """A side that measures."""

    def seconds(self, measure: str) -> float:
        """What one measure takes."""


Samples = dict[str, dict[str, list[list[float]]]]
"""By measure and side: for each start the seconds of its rounds."""


def sample(start: Mapping[str, Callable[[ExitStack], Timed]], starts: int, rounds: int) -> Samples:
    """Measures two sides, which start in the other order each time, and take turns in the order of their start.

    Args:
        start: by name: starts a side, which ends with the stack.
        starts: even.
        rounds: of each measure and start.
    """
    taken: Samples = {measure: {name: [] for name in start} for measure in MEASURES}
    for nth in range(starts):
        names = list(start) if nth % 2 == 0 else list(reversed(start))
        with ExitStack() as stack:
            sides = {name: start[name](stack) for name in names}
            for measure in MEASURES:
                turns = {name: partial(sides[name].seconds, measure) for name in names}
                for name, seconds in alternate(turns, rounds, what=f"start {nth + 1}, {measure}").items():
                    taken[measure][name].append(seconds)
    return taken


def balanced_speed_ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Estimate:
    """How many times as fast as `theirs`: the median over pairs of starts, of which each side has begun one.

    Args:
        ours, theirs: seconds, [starts][rounds]; both in the order of `sample`.
    """
    logs = [
        statistics.median(math.log(slow / fast) for fast, slow in zip(our, their, strict=True))
        for our, their in zip(ours, theirs, strict=True)
    ]
    return estimate([math.exp((one + other) / 2) for one, other in zip(logs[::2], logs[1::2], strict=True)])


def commit_of(root: Path) -> str:
    """The commit that a checkout is at."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(
    base: Annotated[
        Path,
        typer.Option(help="The other checkout, for example a git worktree of an older commit; `.` shows the noise."),
    ],
    pairs: Annotated[int, typer.Option(min=2, help="Pairs of starts: each side starts first in one of a pair.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each measure and start.")] = 8,
) -> None:
    """Measures and reports."""
    here, there = ROOT, base.resolve()
    taken = sample({THIS: lambda stack: Side(stack, here), OTHER: lambda stack: Side(stack, there)}, 2 * pairs, rounds)
    rows: list[Row] = []
    for measure, what in MEASURES.items():
        sides = taken[measure]
        rows += [Row(f"{what}, {name}", ms(list(chain.from_iterable(each))), "ms") for name, each in sides.items()]
        ratio = balanced_speed_ratio(sides[THIS], sides[OTHER])
        rows.append(at_least(f"{what}, {THIS} / {OTHER}", ratio, "x", SHARE))
    report("commit-itself" if here == there else "commit", rows, pairs=pairs, rounds=rounds, base=commit_of(base))


if __name__ == "__main__":
    typer.run(main)
