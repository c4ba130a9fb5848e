"""What does the connector cost the scheduler's thread in each step? 256 requests at once, prompts up to 130,000 tokens.

vLLM's real scheduler, both sides of the connector and a real server; the model is left out: a step's forward pass is
`--forward-ms` in which the scheduler's thread sleeps. Counted is every call that vLLM makes on that thread: arrivals,
lookups, allocations, the metadata with its pickling, reports, ends of requests, events, statistics. Steps in which
nothing is computed are left out. Three rounds: prompts that nobody knows (stores), the next turn of each conversation
(local hits, and stores of what is new), and the same prompts once the engine's own cache is emptied (loads). The pool
is fast; slow, stopped for 40 of each 50 ms; or stopped for good. Beside it, the same without a connector. `large_state`
measures what a step takes where the connector keeps much.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from benchmarks.harness.measuring import Row, at_most, percentile, report, server_process, until_true
from testbed.engine import kvpool_transfer_config
from testbed.tiny_llama import Shape, write

REACH_MS = 2.0
BLOCK_TOKENS = 16
NUM_BLOCKS = 131_072
MAX_TOKENS = 131_072
STEP_TOKENS = 8_192
"""vLLM's default for a server on a large GPU."""
LENGTHS = {130_000: 8, 32_000: 24, 8_000: 64, 1_000: 160}
"""Tokens of a prompt -> how many prompts: 256."""
TURN_TOKENS = 500
OUTPUT_TOKENS = 32
STOPPED_MS, RUNNING_MS = 40, 10
HEAD_SIZE = 4
MEMORY = "512MiB"
MAX_STEPS = 20_000
LAYER = "model.layers.0.self_attn.attn"
STOP_S = 10.0
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_block_frees",
    "take_events",
    "get_kv_connector_stats",
)
SHAPE = Shape(layers=1, hidden=64, intermediate=64, heads=1, kv_heads=1, head_dim=64, vocab=4096, max_tokens=MAX_TOKENS)


@dataclass(slots=True)
class Times:
    """Of one case.

    Args:
        connector_s: of each step, in the connector's calls.
        connector_cpu_s: the part of it in which the thread ran, by call: without waiting for answers, other threads,
            other processes.
        step_s: of each step, on the scheduler's thread, the forward pass left out.
        most_pinned: blocks of the engine that were being stored at once.
    """

    connector_s: list[float] = field(default_factory=list)
    connector_cpu_s: list[dict[str, float]] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    most_pinned: int = 0
    preemptions: int = 0
    counted: dict[str, Any] = field(default_factory=dict)


def configured(model: Path, endpoint: str) -> tuple[Any, Any]:
    """What vLLM makes of its command line, and the KV cache: one group of full attention, one layer.

    Args:
        endpoint: of the pool; empty: no connector.
    """
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from vllm_plugin import register

    register()
    transfer = KVTransferConfig(**kvpool_transfer_config(endpoint, decline_slow_loads=False)) if endpoint else None
    config = EngineArgs(
        model=str(model),
        kv_transfer_config=transfer,
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=sum(LENGTHS.values()),
        prefix_caching_hash_algo="sha256_cbor",
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)],
        kv_cache_layout="LBHNC",
        hash_block_size=BLOCK_TOKENS,
    )
    return config, cache


class Worker:
    """The worker's side, in a process of its own.

    Attributes:
        told: what it tells the scheduler's side when it starts.
    """

    def __init__(self, model: Path, endpoint: str):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, model, endpoint), daemon=True)
        self._process.start()
        self.told = self._pipe.recv()

    def step(self, metadata: bytes) -> Any:
        """What the worker reports of a step, whose metadata it is given pickled."""
        self._pipe.send_bytes(metadata)
        return self._pipe.recv()

    def close(self) -> None:
        """Ends the process."""
        self._pipe.send_bytes(b"")
        self._process.join(STOP_S)


def _work(pipe: Any, model: Path, endpoint: str) -> None:
    import torch
    from vllm.distributed import parallel_state
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.outputs import KVConnectorOutput

    parallel_state._TP = parallel_state._PP = SimpleNamespace(rank_in_group=0, world_size=1)  # type: ignore[assignment]
    config, cache = configured(model, endpoint)
    worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
    worker.worker_side.weights.digest = lambda: bytes(32)  # There is no model to read.
    worker.register_kv_caches({LAYER: torch.zeros(NUM_BLOCKS, 1, BLOCK_TOKENS, 2 * HEAD_SIZE)})
    until_true(lambda: worker.worker_side.session.namespace is not None, "the worker does not reach the pool")
    pipe.send(worker.get_handshake_metadata())
    while metadata := pipe.recv_bytes():
        worker.bind_connector_metadata(pickle.loads(metadata))
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        pipe.send(output)
    worker.shutdown()


class Engine:
    """vLLM's scheduler and both sides of the connector, without a model.

    Args:
        endpoint: of the pool; empty: no connector.
    """

    def __init__(self, model: Path, endpoint: str, forward_ms: float):
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
        self._forward_s = forward_ms / 1000
        config, cache = configured(model, endpoint)
        self._scheduler = Scheduler(
            config, cache, StructuredOutputManager(config), BLOCK_TOKENS, hash_block_size=BLOCK_TOKENS, log_stats=True
        )
        self.times = Times()
        self._in_hooks_s, self._in_hooks_cpu_s = 0.0, dict[str, float]()
        self._worker: Any = None
        preempt = self._scheduler._preempt_request

        def count_and_preempt(*args: Any, **options: Any) -> None:
            self.times.preemptions += 1
            preempt(*args, **options)

        self._scheduler._preempt_request = count_and_preempt
        if not endpoint:
            return
        self._worker = Worker(model, endpoint)
        connector: Any = self._scheduler.connector
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self._worker.told} if self._worker.told else {})
        self._aggregator = KVOutputAggregator.from_connector(connector, 1)
        sessions = connector.scheduler_side.stages.sessions
        until_true(lambda: all(session.namespace for session in sessions), "the connector does not reach the pool")
        for name in HOOKS:
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def run(self, prompts: Sequence[Sequence[int]], name: str) -> None:
        """Submits prompts together, and steps until all are answered and nothing is being stored."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
        requests = [
            Request(f"{name}-{nth}", list(prompt), sampling, None, block_hasher=self._hasher)
            for nth, prompt in enumerate(prompts)
        ]
        gc.collect()
        gc.freeze()  # As vLLM's core does when it has started.
        for request in requests:
            self._scheduler.add_request(request)
        for _ in range(MAX_STEPS):
            if not self._scheduler.has_requests():
                return
            self._step()
        raise RuntimeError(f"the engine is not done after {MAX_STEPS} steps")

    def empty_own_cache(self) -> None:
        assert self._scheduler.reset_prefix_cache(), "blocks are in use"

    def close(self) -> None:
        self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.close()

    def _step(self) -> None:
        began = time.perf_counter()
        scheduled = self._scheduler.schedule()
        packed = self._timed("pickle", pickle.dumps)(scheduled.kv_connector_metadata, pickle.HIGHEST_PROTOCOL)
        step_s = time.perf_counter() - began
        time.sleep(self._forward_s if scheduled.num_scheduled_tokens else 0.0005)
        output = self._output(scheduled, packed)
        began = time.perf_counter()
        outputs = self._scheduler.update_from_output(scheduled, output)
        step_s += time.perf_counter() - began
        for each in outputs.values():
            stats = each.scheduler_stats
            for name, value in (stats.kv_connector_stats if stats and stats.kv_connector_stats else {}).items():
                if isinstance(value, int | float):
                    self.times.counted[name] = self.times.counted.get(name, 0) + value
        if scheduled.num_scheduled_tokens:
            self.times.connector_s.append(self._in_hooks_s)
            self.times.connector_cpu_s.append(self._in_hooks_cpu_s)
            self.times.step_s.append(step_s)
        self._in_hooks_s, self._in_hooks_cpu_s = 0.0, {}
        if self._worker is not None:
            pinned = self._scheduler.connector.scheduler_side.jobs.num_blocks  # type: ignore[union-attr]
            self.times.most_pinned = max(self.times.most_pinned, pinned)

    def _output(self, scheduled: Any, packed: bytes) -> Any:
        """What the workers answer: a token for each request whose prompt is computed."""
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(scheduled.num_scheduled_tokens)
        requests = self._scheduler.requests
        sampled = [[7] if requests[name].num_computed_tokens >= requests[name].num_tokens else [] for name in ids]
        output = ModelRunnerOutput(ids, {name: nth for nth, name in enumerate(ids)}, sampled)
        if self._worker is None:
            return output
        output.kv_connector_output = self._worker.step(packed)
        return self._aggregator.aggregate([output])

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            cpu_began = time.thread_time()  # A system call, which is not to be in the other figure.
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self._in_hooks_s += time.perf_counter() - began
                cpu_s = time.thread_time() - cpu_began
                self._in_hooks_cpu_s[name] = self._in_hooks_cpu_s.get(name, 0.0) + cpu_s

        return timed


@contextlib.contextmanager
def late(pid: int) -> Iterator[None]:
    """A process that runs `RUNNING_MS` out of each `STOPPED_MS + RUNNING_MS`."""
    over = threading.Event()

    def alternate() -> None:
        while not over.wait(RUNNING_MS / 1000):
            os.kill(pid, signal.SIGSTOP)
            over.wait(STOPPED_MS / 1000)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing, and keeps its connections."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def as_it_is(_: int) -> Iterator[None]:
    """A process that is left alone."""
    yield


CASES = {"fast pool": as_it_is, "slow pool": late, "stopped pool": stopped}
NONE = "no connector"


def measure(model: Path, case: str, forward_ms: float) -> Times:
    """Plays the three rounds in one case."""
    randomly = random.Random(0)
    prompts = [
        [randomly.randrange(3, SHAPE.vocab) for _ in range(length)]
        for length, count in LENGTHS.items()
        for _ in range(count)
    ]
    randomly.shuffle(prompts)
    turns = [[*prompt, *(randomly.randrange(3, SHAPE.vocab) for _ in range(TURN_TOKENS))] for prompt in prompts]
    with contextlib.ExitStack() as stack:
        endpoint = ""
        if case != NONE:
            endpoint, pid = stack.enter_context(server_process(MEMORY))
        engine = Engine(model, endpoint, forward_ms)
        stack.callback(engine.close)
        if case != NONE:
            stack.enter_context(CASES[case](pid))
        engine.run(prompts, "first")
        engine.run(turns, "turn")
        engine.empty_own_cache()
        num_hit = engine.times.counted.get("hit_tokens", 0)
        engine.run(turns, "again")
        has_hit = engine.times.counted.get("hit_tokens", 0) > num_hit
        assert has_hit or CASES.get(case) is not as_it_is, "nothing was loaded from a fast pool"
    return engine.times


def rows_of(case: str, times: Times) -> list[Row]:
    """What one case took."""
    rows = []
    measured = {"step": times.step_s}
    if case != NONE:
        cpu_s = [sum(step.values()) for step in times.connector_cpu_s]
        measured = {"connector": times.connector_s, "connector, CPU": cpu_s, **measured}
    for what, seconds in measured.items():
        of_step = {"p50": percentile(seconds, 50), "p99": percentile(seconds, 99), "max": max(seconds)}
        for name, figure in of_step.items():
            label = f"{case}: {what}, {name}"
            is_goal = what == "connector" and name == "p99"
            rows.append(at_most(label, figure * 1e3, "ms", REACH_MS) if is_goal else Row(label, figure * 1e3, "ms"))
    if case != NONE:
        rows.append(Row(f"{case}: blocks being stored at once, at most", times.most_pinned, "blocks"))
    rows.append(Row(f"{case}: preemptions", times.preemptions, "requests"))
    return rows


def tell_slowest(case: str, steps: list[dict[str, float]]) -> None:
    """Tells on stderr which calls take the CPU time of the slowest hundredth of the steps."""
    slowest = sorted(steps, key=lambda step: sum(step.values()))[-len(steps) // 100 :]
    print(f"{case}: CPU of the slowest {len(slowest)} of {len(steps)} steps, mean of each call", file=sys.stderr)
    for name in (*HOOKS, "pickle"):
        mean_s = sum(step.get(name, 0.0) for step in slowest) / len(slowest)
        print(f"  {name:32s} {mean_s * 1e3:8.3f} ms", file=sys.stderr)


def main(
    forward_ms: Annotated[float, typer.Option(help="How long a forward pass takes.", min=0.0)] = 15.0,
    case: Annotated[str, typer.Option(help="Only this case; nothing is written.")] = "",
) -> None:
    """Measures and reports."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows, steps, counted = [], {}, {}
    with tempfile.TemporaryDirectory() as directory:
        model = write(Path(directory), SHAPE)
        for name in [case] if case else [*CASES, NONE]:
            times = measure(model, name, forward_ms)
            rows += rows_of(name, times)
            tell_slowest(name, times.connector_cpu_s)
            steps[name] = len(times.step_s)
            counted[name] = {key: round(value, 3) for key, value in sorted(times.counted.items())}
    if case:
        for row in rows:
            print(f"{row.what:60s} {row.figure:10.3f} {row.unit}")
        print(steps, counted)
        return
    report(
        "step_time",
        rows,
        steps=steps,
        prompts={str(tokens): count for tokens, count in LENGTHS.items()},
        rounds="new prompts; their next turns; the same with the engine's own cache emptied",
        step=f"{STEP_TOKENS} tokens at most; a forward pass of {forward_ms} ms is slept, and is in no figure",
        slow_pool=f"the server is stopped for {STOPPED_MS} of each {STOPPED_MS + RUNNING_MS} ms",
        counted=counted,
    )


if __name__ == "__main__":
    typer.run(main)
