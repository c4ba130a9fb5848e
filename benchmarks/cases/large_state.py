"""What does a step of the scheduler's thread take where the connector keeps much? What `step_time` does not reach.

The connector's own parts over vLLM's real block pool and requests, without a scheduler, a model and a server: blocks
that were announced to routers, requests whose prompts another connector has loaded, and stores that no rank has ended.
Times are the thread's CPU time: nothing here waits.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from benchmarks.cases.step_time import BLOCK_TOKENS, SHAPE, configured
from benchmarks.harness.measuring import Row, at_most, percentile, report
from testbed.tiny_llama import write

MAX_MS = 5.0
NUM_ANNOUNCED = 1 << 20
REPORT_BLOCKS = 512
NUM_REPORTS = 300
MISSING_BLOCKS = 8_125
"""Of a prompt of 130,000 tokens."""
NUM_REQUESTS = 256
PROMPT_BLOCKS = 1_024
NUM_STEPS = 64
NUM_JOBS = 50_000
NUM_CALLS = 20


def _announced(geometry: Any) -> list[Row]:
    """Reports of stores after so many that the oldest are forgotten; new prompts; then a pool that has restarted."""
    from kvpool.protocol.types import BlockRun
    from vllm_plugin.metadata import GroupBlocks, StoreJob
    from vllm_plugin.scheduler.pool_contents import Events

    events = Events(geometry.groups, enabled=True)
    request = _requests(1, REPORT_BLOCKS)[0]
    names = (hashlib.sha256(b"%d" % nth).digest() for nth in itertools.count())

    def store() -> float:
        run = BlockRun(0, list(itertools.islice(names, REPORT_BLOCKS)), b"")
        job = StoreJob(1, [GroupBlocks(0, [run], [[1] * REPORT_BLOCKS], [0])])
        began = time.thread_time()
        events.stored(request, job)
        events.take()
        return time.thread_time() - began

    for _ in range(NUM_ANNOUNCED // REPORT_BLOCKS):
        store()
    _freeze()
    reports = [store() for _ in range(NUM_REPORTS)]
    prompts = [list(itertools.islice(names, MISSING_BLOCKS)) for _ in range(NUM_CALLS)]
    missing = [timed(functools.partial(events.missing, 0, prompt)) for prompt in prompts]
    steps, num_removed, removed = [], 0, 1
    while removed:
        began = time.thread_time()
        if not steps:
            events.all_missing()
        taken: list[Any] = events.take()
        steps.append(time.thread_time() - began)
        removed = sum(len(event.block_hashes) for event in taken)
        num_removed += removed
    assert num_removed > NUM_ANNOUNCED // 2
    return [
        *_figures(f"{NUM_ANNOUNCED} announced blocks: report of {REPORT_BLOCKS} blocks", reports),
        *_figures(f"{NUM_ANNOUNCED} announced blocks: {MISSING_BLOCKS} others are missing", missing),
        *_figures(f"{NUM_ANNOUNCED} announced blocks: step after a pool's restart", steps),
        Row(f"{NUM_ANNOUNCED} announced blocks: steps until all are announced as removed", len(steps) - 1, "steps"),
    ]


def _marked(vllm_config: Any, geometry: Any) -> list[Row]:
    """Steps in which requests decode whose prompts another connector has loaded."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput

    from vllm_plugin.scheduler.provenance import PeerLoads

    loads = PeerLoads(geometry.groups, _parts(vllm_config, geometry)[1])
    num_blocks = PROMPT_BLOCKS + NUM_STEPS // BLOCK_TOKENS + 1
    pool = BlockPool(NUM_REQUESTS * num_blocks + 1, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    requests = _requests(NUM_REQUESTS, PROMPT_BLOCKS)
    tables = {each.request_id: [block.block_id for block in pool.get_new_blocks(PROMPT_BLOCKS)] for each in requests}

    def step(nth: int) -> float:
        output = SchedulerOutput.make_empty()
        output.kv_connector_block_state = KVConnectorBlockState(set(tables), lambda name: (tables[name],), {})
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(tables):
            cached.req_ids.append(request_id)
            grows = (at + nth) % BLOCK_TOKENS == 0
            cached.new_block_ids.append(([pool.get_new_blocks(1)[0].block_id],) if grows else None)
        began = time.thread_time()
        loads.prepare(output)
        return time.thread_time() - began

    for request in requests:
        loads.admitted(request, 0, 0)
        request.num_computed_tokens = PROMPT_BLOCKS * BLOCK_TOKENS
    _freeze()
    first, *others = [step(nth) for nth in range(NUM_STEPS)]
    assert len(loads._first) == NUM_REQUESTS
    label = f"{NUM_REQUESTS} requests of {PROMPT_BLOCKS * BLOCK_TOKENS} tokens that a peer has loaded"
    return [Row(f"{label}: the step that admits all of them", first * 1e3, "ms"), *_figures(f"{label}: step", others)]


def _stored(vllm_config: Any, geometry: Any) -> list[Row]:
    """A request lacks blocks while others have many stores under way, first none of whose blocks can be freed."""
    from vllm.v1.core.block_pool import BlockPool

    from vllm_plugin.metadata import GroupBlocks

    jobs, _ = _parts(vllm_config, geometry)
    pool = BlockPool(NUM_JOBS + 2, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    jobs.bind(pool)
    requests = _requests(NUM_REQUESTS, 1)
    blocks = pool.get_new_blocks(NUM_JOBS)
    added = [
        jobs.add(requests[nth % NUM_REQUESTS], [GroupBlocks(0, [], [[block.block_id]])], bytes(32))
        for nth, block in enumerate(blocks)
    ]
    jobs.begin_step()
    jobs.sent(added)
    _freeze()
    seconds = []
    for _ in range(NUM_CALLS):
        seconds.append(timed(lambda: jobs.relieve()))
        assert not jobs.take_dropped(), "the requests still have their blocks"
    freed = blocks[::NUM_REQUESTS]
    pool.free_blocks(freed)
    relief = timed(lambda: jobs.relieve())
    assert len(jobs.take_dropped()) == len(freed)
    waiting = [timed(lambda: jobs.relieve()) for _ in range(NUM_CALLS)]
    label = f"{NUM_JOBS} stores of {NUM_REQUESTS} requests: a request lacks blocks"
    return [
        *_figures(f"{label}, none can be dropped", seconds),
        Row(f"{label}, {len(freed)} are dropped", relief * 1e3, "ms"),
        *_figures(f"{label}, {len(freed)} were dropped", waiting),
    ]


def _parts(vllm_config: Any, geometry: Any) -> tuple[Any, Any]:
    """Store jobs, and stores, of an engine without a pool."""
    from vllm_plugin.config import ConnectorConfig
    from vllm_plugin.metrics import Recorder
    from vllm_plugin.scheduler.hints import Hints
    from vllm_plugin.scheduler.pool_contents import Events, PoolContents
    from vllm_plugin.scheduler.stages import Stages
    from vllm_plugin.scheduler.store_jobs import StoreJobs
    from vllm_plugin.scheduler.stores import Stores

    config = ConnectorConfig.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
    recorder = Recorder()
    events = Events(geometry.groups, enabled=False)
    contents = PoolContents(events)
    hints = Hints(geometry, Stages(1, config, recorder), recorder)
    jobs = StoreJobs(geometry, config, contents, recorder, hints, lambda request_id: "")
    return jobs, Stores(geometry, config, jobs, contents, recorder)


def _requests(count: int, num_blocks: int) -> list[Any]:
    """Requests whose prompts share no block."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
    sampling = SamplingParams(max_tokens=1, detokenize=False)
    prompts = ([nth] * (num_blocks * BLOCK_TOKENS) for nth in range(count))
    return [
        Request(f"request-{nth}", prompt, sampling, None, block_hasher=hasher) for nth, prompt in enumerate(prompts)
    ]


def timed(action: Callable[[], object]) -> float:
    """CPU seconds that `action` takes."""
    began = time.thread_time()
    action()
    return time.thread_time() - began


def _freeze() -> None:
    gc.collect()
    gc.freeze()  # As vLLM's core does when it has started.


def _figures(what: str, seconds: Sequence[float]) -> list[Row]:
    return [
        Row(f"{what}, mean", sum(seconds) / len(seconds) * 1e3, "ms"),
        Row(f"{what}, p50", percentile(seconds, 50) * 1e3, "ms"),
        at_most(f"{what}, max", max(seconds) * 1e3, "ms", MAX_MS),
    ]


def main() -> None:
    """Measures and reports."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        config, cache = configured(write(Path(directory), SHAPE), "127.0.0.1:1")
    from vllm import envs

    from vllm_plugin.model.groups import Geometry

    envs.enable_envs_cache()  # As vLLM's core does when it has started.
    geometry = Geometry.of(config, cache, "never")
    report("large_state", [*_announced(geometry), *_marked(config, geometry), *_stored(config, geometry)])


if __name__ == "__main__":
    typer.run(main)
