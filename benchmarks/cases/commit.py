"""What has a change cost in one domain? Lookups, puts and gets through shared memory, of two checkouts in turn.

Each side is a client process with a server of its own, both from the side's checkout, which is first on their Python
path. The sides take turns. Both run with the packages of this checkout's environment.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases import commit_side
from benchmarks.harness.measuring import Row, alternate, at_least, ms, process, report, speed_ratio

SHARE = 0.97
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
        command = [sys.executable, commit_side.__file__]
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


def commit_of(root: Path) -> str:
    """The commit that a checkout is at."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(
    base: Annotated[Path, typer.Option(help="The other checkout, for example a git worktree of an older commit.")],
    rounds: Annotated[int, typer.Option(help="Rounds of each measure.")] = 61,
) -> None:
    """Measures and reports."""
    here = Path(__file__).parents[2]
    rows: list[Row] = []
    with ExitStack() as stack:
        sides = {"this commit": Side(stack, here), "the other": Side(stack, base.resolve())}
        for measure, what in MEASURES.items():
            taken = alternate({name: partial(side.seconds, measure) for name, side in sides.items()}, rounds)
            rows += [Row(f"{what}, {name}", ms(taken[name]), "ms") for name in sides]
            ratio = speed_ratio(taken["this commit"], taken["the other"])
            rows.append(at_least(f"{what}, this commit / the other", ratio, "x", SHARE))
    report("commit", rows, rounds=rounds, base=commit_of(base))


if __name__ == "__main__":
    typer.run(main)
