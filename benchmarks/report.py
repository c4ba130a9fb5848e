"""Writes docs/benchmarks.md from benchmarks/results: no figure in it is typed by hand.

python -m benchmarks.report
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"

INTRODUCTION = """# Benchmarks

`make bench` runs them all; each is one module that prints a table and writes `benchmarks/results/<name>.json` with
machine, versions, commit and command. Sides are measured in alternation in one run; figures are medians, ratios are
medians of the rounds' ratios. Absolute times on shared machines drift: look at the ratios, and at the load.
`python -m benchmarks.report` writes this page.
"""

QUESTIONS = {
    "vllm": "What a pool does to a real engine (vLLM on the CPU), beside none, a dead one, and MooncakeStoreConnector.",
    "transport": """How fast bytes travel, beside memcpy + xxh3, Mooncake Store over loopback TCP, and a bare gRPC
stream. A plain memcpy + xxh3 is itself only 6 to 7 times Mooncake here, so 5 times leaves three quarters of copy speed
for us; what is missing is the latency of the two or three calls around a batch.""",
    "lookup": """How long a lookup with a lease takes, at tensor-parallel sizes 1 and 8, beside Mooncake Store with the
keys that vLLM's connector makes. kvpool alone decides the reach; beside Mooncake both share two cores.""",
    "memory": "Server memory beyond the arena.",
    "gpu": """A real GPU, Llama-3.1-8B's shape, beside no pool and vLLM's own in-process offloading to CPU memory.
Warm: what one process stored, another loads, checksums on. `--questions` is 20 in the scenario as it was published;
where it says less, time on the machine was short.""",
    "gpu_copy": "Blocks of the same shape between KV cache and pinned memory, hashed on the way, beside plain copies.",
}


def main() -> None:
    """Write the page and say where."""
    parts = [INTRODUCTION]
    for name, question in QUESTIONS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts.append(_section(name, question, json.loads(path.read_text())))
    DOCUMENT.write_text("\n".join(parts))
    print(DOCUMENT)


def _section(name: str, question: str, result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    lines = [
        f"## {name}",
        "",
        question,
        "",
        f"`{result['command']}`, {result['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, "
        f"load {machine.get('load_average_1_min', '?')}; {versions}.",
        "",
        "| what | figure | reach | met |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        met = {None: "", True: "yes", False: "**no**"}[row["met"]]
        lines.append(f"| {row['what']} | {row['figure']:.4g} {row['unit']} | {row['reach']} | {met} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
