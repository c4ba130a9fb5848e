"""Writes the page of benchmarks, a page for each result, and plots from benchmarks/results: no figure is typed by hand.

python -m benchmarks.harness.report
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import typer

from benchmarks.cases import kv_bytes, weights
from benchmarks.harness import figures, glance
from benchmarks.harness.measuring import RESULTS, WITHIN_NOISE, change, git, last_result, spread, verdict
from benchmarks.harness.plots import draw

DOCUMENT = Path(__file__).parents[2] / "docs" / "explanation" / "benchmarks.md"
TABLES = {"memory": kv_bytes.table, "digest": weights.table}
PLOTS = DOCUMENT.parents[1] / "plots"
PRODUCT = ("kvpool", "kvpool_server", "vllm_plugin", "proto")

TITLE = "# Benchmarks\n"
INTRODUCTION = """## How these are measured

`make bench` runs all benchmarks that need no GPU, in a quarter of an hour, and `make bench-gpu` the others, with the
python3, vLLM and kvpool that are installed. `python -m benchmarks.cases.NAME` runs one: it prints a table beside the
previous result, and writes `benchmarks/results/NAME.json`; `serving` takes your trace. What your engines gain is
`vllm:kvpool_saved_seconds_total` less `vllm:kvpool_lost_seconds_total`.

- Both sides of a comparison are measured in alternation in one run, but for engines under load. A figure of several
  rounds is their median. A ratio is the median of the rounds' ratios, because changing load hits both sides of a round
  alike.
- "Spread" is the noise: 95 % of all resamplings of the rounds give a figure between its two ends.
- "Reach" is the target that was set before measuring. "Met" is "yes" or "no" if all of the spread lies on one side of
  the reach, and "within noise" if the reach lies inside the spread. A verdict in brackets judges the figure alone: its
  result was written before spreads were recorded.
- Absolute times on shared machines drift by half and more: compare ratios.

`python -m benchmarks.harness.report` writes this page, its plots, a page for each result, and the figures of other
pages that name a result. It names each result whose code has changed since it was measured.
"""
ALL_RESULTS = (
    "## All results",
    "",
    "Each page has the command, machine, versions and commit, every row, and first the targets that were missed.",
    "",
    "| result | question | targets met | date |",
    "|---|---|---|---|",
)

QUESTIONS = {
    "vllm": """What a pool does for a real engine (vLLM on the CPU), beside no pool, a dead pool, and
MooncakeStoreConnector.""",
    "serving-gpu": """What engines under load gain by a store beside them: Llama-3.1-8B's shape with random weights, two
engines on one GPU, requests in an open loop. All arms have the same memory beside the engines' own caches, in equal
parts where it is private; the files of tiered offloading have no bound unless the arm says so. Possible hits are those
of one cache for all engines, in the requests' order: an infinite one, and one of the stores' memory. Answers can differ
from those without connector because batches are composed in other ways, which changes how floating-point sums round.
The time to first token counts from the arrival. Mooncake's store runs in the engines: its CPU time is theirs.
"Ideal" is a simulation: a device that computes as fast as the engines without connector at saturation, and stores that
hold everything, answer at once and cost nothing: within a tenth, no pool reaches more. Documents at saturation and
at one and a half times: three rounds of one command (`--arms 'none,kvpool shm,kvpool tcp,offloading,tiered
bounded,kvpool tcp+tls' --loads 1,1.5 --rounds 3`; Mooncake: one, of an earlier commit), the arms one after the other,
the rounds of an arm in one start: the pool is full from the second rate on. At a half of saturation and at twice:
two rounds of one later command (`--loads 0.5,2 --rounds 2`, without TLS), and one round at a quarter, for hit tokens
alone. Other workloads are of one round each, of earlier commits and load policies. A ratio is of runs of one round, but
requests per second are of all rounds, interpolated between
the rates that ran and at most the highest of them. Not measured in this form: one and four
engines, sticky routing, the other published workloads, LMCache, and tiered offloading without a bound.
What bounds the misses: the slowest hundredth waits as long as with the ideal pool, for requests that came before and
must be computed. At saturation the ideal pool's mean is 0.64 of ideal private stores', and the rate at which nine of
ten requests wait for a second at most is a quarter above that of none for the ideal pool, too; kvpool's is a tenth
higher still, which shows how exact the simulation is. Of 1 million tokens that
an infinite cache hits, beyond saturation 25,000 are asked for while their document is being computed, and 40,000 have
been evicted (50,000 by an LRU): the rest of what kvpool lacks to the ideal pool. Over TCP up to three hundredths of the
hit tokens are declined there, too, and a tenth with TLS: computing them ends sooner. Engines that fall behind pay for
each lost hit again. At half of saturation TCP gains little: a GPU that idles half of the time computes a document
nearly as soon. Conversations of eight turns are larger together than the pool: what is evicted is computed again, and
prompts so long take more than twice as long over TCP as through shared memory ([gpu_network](gpu_network.md)).
At one and a half times saturation engines without a pool, and with offloading, fall behind, and their means grow with
the number of requests; at twice saturation all do. A shared system prompt stays in every engine's own cache, so no
store can gain there: kvpool costs what lookups of new tokens and their stores take.""",
    "serving": """The same in a small form, on two CPU cores that engines, stores and the benchmark share: that all of
it runs, and no measure of a GPU's gain.""",
    "start": """How much later an engine answers its first prompt that names its weights by the content of their files:
Llama-3.1-8B's shape, without CUDA graphs and compilation. "Never read": the host's first start with this checkpoint,
which kvpool reads beside the engine's warm-up; the scheduler waits for the end of it.""",
    "transport": """How fast bytes travel, beside memcpy + xxh3, Mooncake Store over loopback TCP, and a bare gRPC
stream. shm is slower than memcpy + xxh3 by the latency of the two or three calls around a batch. The target of twice
Mooncake is out of reach here: a bare TCP socket does not reach it either. A put over the network is also hashed before
it is sent, which adds to its time on two cores that sender and receiver keep busy.""",
    "tls": """What certificates and encryption cost: lookups and bytes over the data port, beside a server without
TLS in the same run.""",
    "commit": """What came in one domain with authentication, limits and encryption: clients and servers of this commit
and of bc2aeaf, before it, through shared memory. A lookup whose caller waits for the release is slower. The server
receives a call's one message within a time and a size, which gRPC does for no handler of one request: a tenth more of
its CPU a call. The client's stream of lookups uses gRPC's public interface, with one thread more on the way; bc2aeaf
drove gRPC's internals. Engines never wait for a release: it travels with the next lookup. In this run the side of this
commit always started first. Its arena got scattered pages, so its puts and gets were slower by some percent.""",
    "commit-itself": """The noise of that benchmark: a commit beside itself. Each side starts first in one start of a
pair, and the spread is that of pairs, because starts differ from each other by more than rounds.""",
    "tls-16-cores": "The same on a GPU's host, with 16 cores: client and server have cores of their own.",
    "transport-16-cores": """The same on a GPU's host, with 16 cores and a newer Mooncake. One thread copies and sums
3.6 GB/s<!-- transport-16-cores: memcpy + xxh3, 1 shards --> there, so where cores are many other threads compute the
checksums (`kvpool.transport.helpers`).""",
    "lookup": """How long a lookup with a lease takes, at tensor-parallel sizes 1 and 8, beside Mooncake Store with the
keys that vLLM's connector makes. The reach is judged by kvpool alone, because beside Mooncake both share two cores.
Ping is slower than a small lookup: Ping is a gRPC call of its own, and lookups are messages of one open call.""",
    "step_time": """What the connector costs the scheduler's thread in each step, and the whole step on that thread
without the forward pass, beside an engine without connector: 256 requests at once, prompts of up to 130,000 tokens.
"CPU" is the time in which the thread ran; the rest is waiting for answers, for Python's lock and for other processes on
the same cores. The worker is a process of its own here, as with several GPUs. The slowest steps are the first ones of a
round, behind an idle time: there the connector may work longest, because else hits of a burst would be declined. So
the target is out of reach while a step [may work](../../docs/explanation/design.md) for more than twice as long.""",
    "large_state": """What a step takes where the connector keeps much: a million blocks that were announced to routers,
256 requests whose prompts another connector has loaded, and 50,000 stores under way. CPU time of the scheduler's thread
in those parts of the connector alone.""",
    "clients": """What 1 to 256 clients at once get from one server: lookups of 64 blocks with a lease, whole loads,
and small puts and gets, each client a process of its own. The event loop is one thread of the server: at one core it
is full, and more clients only wait longer. The server answers in the order of arrival; fairness is the slowest
client's share of the calls over the mean share. No call may exceed its deadline, a client's default of a second: 64
clients that call again at once keep every core busy, and each call waits for 64 others. With more clients or fewer
cores, raise `timeout_ms`. Where clients and server share few cores, calls a second say little of the server: compare
its CPU a call. A client's next lookup also releases its last lease, and its answer says where blocks lie, so the server
handles one message a lookup and one a load.""",
    "clients-16-cores": """The same on a GPU's host, with 16 cores: the event loop has a core of its own, which is full
from 16 clients on.""",
    "restarts": """What the end of a server costs. The server below its keeper gets SIGKILL while a client looks up and
puts; the pool holds a million small blocks. Then what keeping costs: puts and lookups of one client, of a server
whose memory is kept and of one with `--keep no`, in turns. Last the Mooncake trace against the pool, which dies after
each thousandth request. Mooncake Store's objects end with the process that holds their segment; memcached's, in a
memory file, outlive only the signal that asks it for a restart. Records of small blocks are what the puts pay for.
Bound to two cores of a larger host.""",
    "restarts-16-cores": """The same on a GPU's host, with 16 cores, and with a million blocks of which each has some
tokens' bytes (`block KiB`). The kernel unmaps the memory of the server that was killed before the next one may have
it.""",
    "replay": """Which share of the blocks of a chat service's prompts hits in a pool of a given size: 12,031 requests
of the Mooncake trace, through the server's own pool, in memory and without bytes. No policy can have more hits than
the clairvoyant, which knows every next use; what all have at 100 % is what the trace repeats. Then made-up traces of
one shape each (`benchmarks.harness.workloads`), where the default policy must not lose hits that `lru` has. Published
policies (libCacheSim, default parameters) see the same blocks one by one, and a block hits only if all before it in
its prompt do. Where 1 block in 50 or in 20 fits, MQ has more hits on the Mooncake trace than `density`: it
remembers four evicted blocks for each that fits, `density` half of one. At larger capacities `density` has most. On
made-up traces the best published policy, another one from trace to trace, is ahead of `density` about as often as
behind it. Without the trace (`--trace PATH`) this is skipped. Any trace: `examples/notebook`.""",
    "peers": """Which share of one large pool's hits many servers have that read from one another: real pools, a
directory without a delay, and a production trace that repeats a third of its blocks. All servers together hold three
tenths of its distinct blocks. An aware router takes the server with the longest prefix if that is half of the prompt,
else the one with the fewest requests. Documents: made up, with forty requests per server behind one common prompt,
while nothing happens and while something does.""",
    "peer_reads": """What a prompt costs that only another server holds, and a lookup that no server can answer: three
real servers on this host, and a directory. The directory's round trip is that of its own client, idle; beside it the
server's event loop packs and parses. A server of the last row has a million blocks of 16 tokens, and gets ten prompts
of 8,000 new tokens a second.""",
    "peer_reads-16-cores": """The same on a GPU's host, with 16 cores. A client that reads the prompt at once moves
three quarters as much as bare sockets; between servers the lookup, the leases, the first, small reads and the making of
room take the rest of the time. The prompt is loaded from the server's memory only when all of it is up: half as much
time again.""",
    "tiers": """The file tier beside its disk (a virtual machine's, whose own cache flatters writes); a restart with a
million blocks; a prompt of 64 MiB that a server brings up right after its start; and what a tier costs puts, also a
tier that does not answer (Mooncake's, with a stopped master). In this result the puts found free
memory; the benchmark now puts into a full arena.""",
    "mooncake_tier": """The Mooncake tier, with the pool above it, beside Mooncake's own client on the same cluster:
the same blocks, in batches of as many bytes, from and to registered buffers. The tier stages its bytes, so each is
copied once more, and verified on its way up. Then a client of a server whose arena is empty loads prompts from the
cluster, part by part as blocks come up, or all at once when the last one is up.""",
    "mooncake_tier-16-cores": "The same on a GPU's host, with 16 cores.",
    "promotion": """What a request waits for whose blocks lie in a file tier, and no longer in the arena. First, when an
engine learns that they are up, by the length of its steps: each step asks again, or a lookup waits at the server. Then
a client that loads a prompt as its blocks come up, beside one that waits for all of them.""",
    "soak": """Three servers over one shared directory and one Mooncake cluster, at full speed, while servers and the
cluster's master are killed, stopped and restarted, and bytes on the disk change. Every byte that a client gets is
compared with the expected byte; at the end no slot, lease or ticket may be held or lost.""",
    "network": """How much of what its wires carry the data port moves: one client by connections, four clients, and
shared memory, beside bare sockets and beside threads that copy and sum. "Without sums": the checksums come from
elsewhere, as on a GPU. A bare server sends from one place in its cache; kvpool moves a whole pool's memory.""",
    "network-16-cores": """The same on a GPU's host, with 16 cores, which clients, data workers and bare servers share.
What bounds the puts: memory (bare servers that keep a batch, as a pool does, are slower, too), the calls before and
after the bytes, whose time is that of puts of tiny blocks, and with sums the threads that sum. Twice as many data
workers change nothing. Two ranks share what the host's loopback carries: two bare ones get half of one's
rate each, so a rank of two over a rank alone says nothing of kvpool there.""",
    "wan": """How fast blocks travel between two machines with delay and loss on the way, beside one
bare TCP connection over the same link: two network namespaces, joined by a process that carries packets (no privileges,
no netem; `testbed.link`). A put makes two round trips besides its bytes, and a get one: the lookup, which says where
the blocks lie. The upper limit is the same link without delay and loss.""",
    "server": """What a server costs, beside its arena: CPU time of all its processes, without the clients', and
memory as PSS, without shared memory. Through shm the server moves no bytes, so it pays for the calls alone.""",
    "memory": """Server memory beyond the arena, an entry (PSS). Ten million entries take
`python -m benchmarks.cases.memory --entries 10000000` and `python -m benchmarks.cases.lookup --entries 10000000`: a few
minutes, and no part of `make bench`.""",
    "lookup-10-million": "The lookups above with ten million entries; the change is against one million.",
    "weights": """How fast an engine digests the files of its weights when it first starts with them; the disk is a
virtual machine's.""",
    "memory-10-million": "Server memory beyond the arena with ten million entries.",
    "gpu": """A real GPU, Llama-3.1-8B's shape, beside none, vLLM's in-process offloading to CPU memory, and Mooncake's
connector over TCP, with its connection pool. Warm: another process loads what one process stored, checksums on.""",
    "interference": """What loads cost a thread that works in the same process, on a host of many cores: steps of Python
and calls that give up its lock, beside loads into staging that nobody sums, as an engine with a GPU makes them.""",
    "gpu_network": """Loads over TCP (loopback, one host) into an engine on a GPU, beside loads from shared memory.
Rows that name a number of connections come from `--connections`, from engines one after the other. A load takes eight
connections where its engine computes nothing meanwhile, and four beside requests that decode. Held by another server:
the engine shares the memory of a server that has none of the prompt, and reads all of it from the server that has;
only then the engine loads. What bounds the misses: over TCP, the bytes on the wire and the step that computes the last
token; from another server, the same bytes, at three fifths of the rate of bare sockets
([peer_reads](peer_reads-16-cores.md)), and then the load from the server's memory. Processes of the server's own read
them: read by threads of the server, in the same hour, such a prompt took two fifths longer.""",
    "gpu_questions": """Two engines on one GPU answer questions about 8 documents of 20,000 tokens, in any order, 8 in
flight, 64 tokens each; neither engine can keep more than two documents. Pairs of engines take turns; Mooncake's pair
gets a quarter of the questions, and the pair without a pool a tenth. In this run Mooncake's pair had not answered its
questions some minutes later, when the benchmark ended it.""",
    "gpu_parallel": """Tensor-parallel ranks, each with a GPU and a bus of its own, load their shares of a prompt.
A rank's rate is over its whole load, from the call for the blocks' regions to the last checksum. The parts of a load
that do not depend on bytes take as long for many ranks as for one, and weigh more on smaller shares. Benchmarks on the
host's other GPUs ran beside it, so the times, offloading's too, are longer than those before.""",
    "gpu_parallel-tcp": """The same over TCP (loopback), as if the pool were on another host:
`python -m benchmarks.cases.gpu_parallel --transport tcp`. The ranks and the server share the host's loopback and
memory, see the two ranks of network-16-cores.""",
    "package": """What an install of kvpool costs, without PyTorch and vLLM: bytes on the disk, and CPU time of whole
processes that import it.""",
    "gpu_copy": "Blocks of the same shape between KV cache and pinned memory, hashed on the way, beside plain copies.",
}


def main() -> None:
    """Writes the pages, their plots, and the figures in other pages; says where."""
    for path, text in pages().items():
        path.write_text(text)
        print(path)
    for path in figures.documents():
        text = path.read_text()
        if (written := figures.refresh(text, TABLES)) != text:
            path.write_text(written)
            print(path)
    for name in QUESTIONS:
        if age := _age(name):
            print(f"{name} is older than today's code: {age}")


def _age(name: str) -> str:
    """How many commits have changed the product since a result was measured; empty if none has."""
    commit = (last_result(name) or {}).get("commit", "HEAD").removesuffix("-dirty")
    since = git("rev-list", "--count", f"{commit}..HEAD", "--", *(f":(top){folder}" for folder in PRODUCT))
    if since.returncode:
        return f"commit {commit} is not in this repository"
    return "" if since.stdout == "0\n" else f"{since.stdout.strip()} commits of the product"


def pages() -> dict[Path, str]:
    """Path -> text of docs/explanation/benchmarks.md, and of a page beside each result; draws their plots."""
    found, rows = {}, []
    for name, question in QUESTIONS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            written = figures.refresh(question)
            found[path.with_suffix(".md")] = _page(name, written, result)
            rows.append(_row(name, written, result))
    parts = [TITLE, *glance.section(RESULTS, PLOTS, DOCUMENT), INTRODUCTION, *ALL_RESULTS, *rows, ""]
    return {DOCUMENT: "\n".join(parts), **found}


def _row(name: str, question: str, result: dict[str, Any]) -> str:
    """One result in the table of all: what was asked, and how many of its targets were met."""
    asked = re.split(r"(?<=[.:?;]) ", " ".join(question.split()))[0].rstrip(".:;")
    judged = [row["met"] for row in result["rows"] if row["met"] is not None]
    targets = f"{judged.count(True)} of {len(judged)}" if judged else ""
    link = os.path.relpath(RESULTS / f"{name}.md", DOCUMENT.parent)
    return f"| [{name}]({link}) | {asked} | {targets} | {result['date'][:10]} |"


def _page(name: str, question: str, result: dict[str, Any]) -> str:
    machine = result["machine"]
    plot = draw(name, result, PLOTS)
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    lines = [
        f"# {name}",
        "",
        question,
        "",
        f"`{result['command']}`, {result['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, "
        f"load {machine.get('load_average_1_min', '?')}, commit {_short(result['commit'])}; {versions}.",
        "",
        *_facts(result),
        *([f"![{name}]({os.path.relpath(plot, RESULTS)})", ""] if plot else []),
        *_misses(result),
        *_table(result),
        *panels(result),
    ]
    return "\n".join([*lines, ""])


def _facts(result: dict[str, Any]) -> list[str]:
    """What a reader must know of how it was measured."""
    told = [(name.replace("_", " "), value) for name, value in result["facts"].items()]
    lines = [f"- {name}: {value:,}" for name, value in told if isinstance(value, int | float)]
    lines += [f"- {name}: {value}" for name, value in told if isinstance(value, str)]
    return [*lines, ""] if lines else []


def _misses(result: dict[str, Any]) -> list[str]:
    lines = []
    for met, words in ((False, "Not reached"), (WITHIN_NOISE, "Within noise")):
        if rows := [row["what"] for row in result["rows"] if row["met"] == met]:
            lines += [f"**{words}:** {'; '.join(rows)}.", ""]
    return lines


def _table(result: dict[str, Any]) -> list[str]:
    """The rows, and how they have changed since the result before."""
    before = result.get("before")
    lines = []
    if before:
        same = "the same kind of machine" if _kind(before["machine"]) == _kind(result["machine"]) else "another machine"
        lines = [f"Changes are against {before['date'][:10]}, commit {_short(before['commit'])}, on {same}.", ""]
    lines += ["| what | figure | spread | reach | met | change |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        figure = f"{row['figure']:.4g} {row['unit']}".rstrip()
        met = verdict(row).replace("no", "**no**") if row["met"] is False else verdict(row)
        changed = change(row["figure"], row.get("before"))
        lines.append(f"| {row['what']} | {figure} | {spread(row)} | {row['reach']} | {met} | {changed} |")
    return lines


def panels(result: dict[str, Any]) -> list[str]:
    """The plot's lines, one a row, a table a panel."""
    tables: dict[str, list[str]] = {}
    for series in result.get("series", ()):
        sizes = [f"{x:,} {series['x_unit']}" for x in series["x"]]
        heading = f"| {series['plot']}, {series['y_unit']} | {' | '.join(sizes)} |"
        table = tables.setdefault(heading, ["", heading, "|---" * (len(sizes) + 1) + "|"])
        table.append(f"| {series['name']} | {' | '.join(f'{y:.3g}' for y in series['y'])} |")
    return [line for table in tables.values() for line in table]


def _short(commit: str) -> str:
    return commit[:12] + "-dirty" * commit.endswith("-dirty")


def _kind(machine: dict[str, Any]) -> tuple[Any, ...]:
    return machine["cpu"], machine["cores"], machine["memory_gib"]


if __name__ == "__main__":
    typer.run(main)
