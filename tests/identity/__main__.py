"""Runs the identity oracle over all variants and writes build/identity.md.

    SHARD=1/4 SOAK_SECONDS=28800 python -m tests.identity

Every shard runs the base engine and each n-th variant, and judges all pairs of the engines that it has run. The report
of a shard other than 1/1 is build/identity-I-of-N.md. The status is 1 if a pair with one namespace has different KV.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.identity.oracle import Observation, Verdict, judge, observe, pairs, write_base
from tests.identity.variants import BASE_VARIANT, unvaried, variants
from tests.support.real_engines import small_processes

BUILD = Path(__file__).parents[2] / "build"
START_TIMEOUT_S = 120.0


def main() -> int:
    """Runs one shard until its variants or its seconds end."""
    shard, _, num_shards = os.environ.get("SHARD", "1/1").partition("/")
    deadline = time.monotonic() + float(os.environ.get("SOAK_SECONDS", "inf"))
    chosen = variants()[1:][int(shard) - 1 :: int(num_shards)]
    name = "identity.md" if num_shards == "1" else f"identity-{shard}-of-{num_shards}.md"
    observations: list[Observation] = []
    with tempfile.TemporaryDirectory(prefix="kvpool-identity-") as scratch, small_processes(Path(scratch)):
        model = write_base(Path(scratch) / "base")
        for nth, variant in enumerate([BASE_VARIANT, *chosen]):
            if time.monotonic() > deadline:
                break
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                found = observe(model, variant, Path(folder), start_timeout_s=START_TIMEOUT_S)
            observations.append(found)
            verdict, why = judge(observations[0], found)
            print(f"{nth}/{len(chosen)} {variant}: {verdict.value} {why}", flush=True)
            _write(BUILD / name, observations, len(chosen))
    return int(any(verdict is Verdict.FAILURE for _, _, verdict, _ in pairs(observations)))


def _write(path: Path, observations: Sequence[Observation], num_chosen: int) -> None:
    judged = list(pairs(observations))
    base, *others = observations
    of_base = {str(each.variant): judge(base, each) for each in others}
    with_base = _counted(verdict for verdict, _ in of_base.values())
    failures = [
        f"- `{one.variant}` and `{other.variant}`: {why}"
        for one, other, verdict, why in judged
        # A variant that differs from the base differs from all that agree with it, too.
        if verdict is Verdict.FAILURE and (one is base or of_base[str(one.variant)][0] is Verdict.APART)
    ]
    lines = [
        "# Engines with one namespace compute the same KV",
        "",
        f"{len(others)} of {num_chosen} variants, with the base: {with_base}.",
        "",
        f"{len(judged)} pairs: {_counted(verdict for _, _, verdict, _ in judged)}.",
        "",
        *(failures or ["No pair with one namespace has different KV."]),
        "",
        "| variant | verdict | remark |",
        "|---|---|---|",
        *(
            f"| `{name}` | {verdict.value} | {why.replace('|', '/')} |"
            for name, (verdict, why) in sorted(of_base.items())
        ),
        "",
        f"Not varied, because no argument sets the field or no other value follows from its type: {unvaried()}.",
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _counted(verdicts: Iterable[Verdict]) -> str:
    counted = Counter(verdicts)
    return ", ".join(f"{counted[verdict]} {verdict.value}" for verdict in Verdict)


if __name__ == "__main__":
    sys.exit(main())
