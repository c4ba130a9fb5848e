"""The process of a `testbed.engine.Engine`: runs vLLM's `LLM` and answers each line of JSON with one line of JSON."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from testbed.engine import BLOCK_TOKENS, Answer, Prompt


def serve() -> None:
    """Starts the engine that the first line describes, and obeys one command a line until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What vLLM prints goes to the log: standard output carries answers alone.
    from vllm import LLM

    spec = json.loads(sys.stdin.readline())["spec"]
    started = time.monotonic()
    llm = LLM(**arguments(spec))
    _warm_up(llm)
    print(json.dumps(time.monotonic() - started), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_obey(llm, json.loads(line))), file=answers, flush=True)
    gc.collect = lambda generation=2: 0  # vLLM would collect a heap that is about to be dropped, for a second.
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # An orderly end of a large interpreter takes seconds more.


def arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """vLLM's arguments for an engine, of the fields of an `EngineSpec`."""
    return {
        "model": spec["model"],
        "kv_transfer_config": spec["transfer"],
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "prefix_caching_hash_algo": "sha256_cbor",
        "disable_log_stats": False,
        **spec["options"],
    }


def _obey(llm: Any, command: dict[str, Any]) -> Any:
    if "generate" in command:
        return _generate(llm, command)
    if "reset" in command:
        _wait_for_stores(llm)
        return llm.reset_prefix_cache(reset_connector=command["reset"])
    if "sleep" in command:
        _end_stores(llm)
        return llm.sleep(level=command["sleep"])
    if "wake_up" in command:
        return llm.wake_up()
    if "decode" in command:
        return _decode(llm, command["decode"], command["arrivals"], command["max_tokens"])
    if "call" in command:
        module, _, name = command["call"].partition(":")
        return getattr(importlib.import_module(module), name)(llm, *command["arguments"])
    assert "metrics" in command, f"unknown command {command}"
    return totals(llm.get_metrics())


def _generate(llm: Any, command: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=command["max_tokens"],
        **{"temperature": 0, "logprobs": 0, "detokenize": False, "ignore_eos": True, **command["options"]},
    )
    given = [Prompt(**each) for each in command["generate"]]
    prompts = [_vllm_prompt(each, llm.model_config.get_hidden_size()) for each in given]
    adapters = [_adapter(each.lora) for each in given]
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapters if any(adapters) else None)
    return [asdict(_answer(output)) for output in outputs]


def totals(metrics: Iterable[Any]) -> dict[str, float]:
    """What `Engine.metrics` returns, of vLLM's series."""
    totals: dict[str, float] = {}
    for metric in metrics:
        for field, suffix in (("value", ""), ("sum", "_sum"), ("count", "_count")):
            if (value := getattr(metric, field, None)) is not None:
                cause = metric.labels.get("cause") or metric.labels.get("source")
                for name in (metric.name + suffix, *([f"{metric.name}{suffix}:{cause}"] if cause else ())):
                    totals[name] = totals.get(name, 0) + value
    return totals


def _warm_up(llm: Any) -> None:
    """Computes and decodes several prompts at once, each too short for a block: none is looked up, stored or cached.

    On processors with AMX vLLM's CPU build dies of SIGILL if the first step of an engine computes one token in
    bfloat16, which is what a hit leaves to be computed (docs/how-to/operations.md).
    """
    from vllm import SamplingParams

    if llm.model_config.runner_type != "generate":
        return
    short = min(BLOCK_TOKENS, llm.llm_engine.vllm_config.cache_config.block_size) // 2
    sampling = SamplingParams(temperature=0, max_tokens=short // 2, detokenize=False, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [5] * short}] * 4, sampling, use_tqdm=False)


def _decode(llm: Any, background: list[list[int]], arrivals: list[list[int]], max_tokens: int) -> list[float]:
    from vllm import SamplingParams

    def add(name: str, tokens: list[int], count: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": tokens}, sampling)

    engine = llm.llm_engine
    for nth, tokens in enumerate(background):
        add(f"background {nth}", tokens, max_tokens)
    waiting = list(enumerate(arrivals))
    last: dict[str, float] = {}
    between: list[float] = []
    arrived = ""
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id.startswith("background"):
                if output.request_id in last:
                    between.append(now - last[output.request_id])
                last[output.request_id] = now
            elif output.finished:
                arrived = ""
        if waiting and not arrived and len(last) == len(background):
            nth, tokens = waiting.pop(0)
            arrived = f"arrival {nth}"
            add(arrived, tokens, 1)
    return between


def _end_stores(llm: Any) -> None:
    """In its own process vLLM steps by itself while blocks are being stored; in this one, only while it generates."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    while core is not None and core.scheduler.has_requests():
        llm.llm_engine.engine_core.get_output()


def _wait_for_stores(llm: Any) -> None:
    """Returns when no block is being stored: in its own process vLLM's core takes so long to pause."""
    _end_stores(llm)
    if getattr(llm.llm_engine.engine_core, "engine_core", None) is None:
        llm.sleep(level=0, mode="wait")
        llm.wake_up(["scheduling"])


def _vllm_prompt(prompt: Prompt, hidden_size: int) -> dict[str, Any]:
    salt = {"cache_salt": prompt.cache_salt} if prompt.cache_salt else {}
    if prompt.embeds_seed is None:
        return {"prompt_token_ids": prompt.tokens, **salt}
    import torch

    generator = torch.Generator().manual_seed(prompt.embeds_seed)
    return {"prompt_embeds": torch.randn(len(prompt.tokens), hidden_size, generator=generator) * 0.08, **salt}


def _adapter(directory: str) -> Any:
    if not directory:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(Path(directory).name, 1 + zlib.crc32(directory.encode()), directory)


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    logprobs = [step[token].logprob for token, step in zip(tokens, completion.logprobs or [], strict=False)]
    return Answer(tokens, logprobs, output.metrics.first_token_latency, output.num_cached_tokens or 0)


if __name__ == "__main__":
    serve()
