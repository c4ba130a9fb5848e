"""The script that weighs memory against GPUs, with the JSON that `kvpool value` prints."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.support.prometheus import ROOT

SCRIPT = ROOT / "examples" / "value" / "cheapest.py"
GIB = 1 << 30
PRICES = ("--gib-month", "3", "--gpu-hour", "2.5", "--prefill", "1000")


def run(report: dict[str, Any], *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *PRICES, *more]
    return subprocess.run(command, input=json.dumps(report), capture_output=True, text=True, timeout=60)


def test_memory_is_weighed_against_gpus() -> None:
    estimates = [{"arena_bytes": GIB * size, "hit_ratio_with_tiers": ratio} for size, ratio in ((1, 0.5), (1024, 0.6))]
    done = run({"seconds": 10.0, "curves": [{"lookup_tokens": 40_000, "estimates": estimates}]})
    assert done.returncode == 0, done.stderr
    costs = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert costs == [
        "1.00 GiB 50.0% hit 4 GPUs for prefill 7,303 a month",
        "1024.00 GiB 60.0% hit 4 GPUs for prefill 10,372 a month",
        "0.00 GiB 0.0% hit 8 GPUs for prefill 14,600 a month",
    ]
    done = run({"seconds": 0.0, "curves": [{"estimates": []}]})
    assert done.returncode == 1 and "no lookups yet" in done.stderr
    done = run({}, "--prefill", "0")
    assert done.returncode == 2 and "--prefill 0.0 must be above 0" in done.stderr
