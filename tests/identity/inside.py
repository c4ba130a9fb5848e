"""What the oracle has an engine's own process do: `engine.call("tests.identity.inside:observe", ...)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from vllm import LLM, SamplingParams

from vllm_plugin.model import identity, kv_fields, weights


def observe(llm: LLM, prompt: list[int], kv_path: str, without: Sequence[str]) -> dict[str, Any]:
    """The namespace of an engine, its greedy answer to a prompt, and the KV of the prompt's whole blocks.

    Args:
        kv_path: gets the KV as a float32 array, unless another process has it.
        without: rules of the namespace, as `broken` knows them.

    Returns:
        {"fingerprint", "without": {rule: fingerprint without that rule}, "in_doubt", "tokens", "logprobs", "has_kv"}.
    """
    core: Any = llm.llm_engine.engine_core.engine_core
    specs = core.scheduler.connector.scheduler_side.stages.specs
    assert specs, "the engine has no namespace"
    blocks: list[tuple[list[int], ...]] = []
    manager, free = core.scheduler.kv_cache_manager, core.scheduler.kv_cache_manager.free

    def note_and_free(request: Any) -> None:
        blocks.append(manager.get_block_ids(request.request_id))
        free(request)

    manager.free = note_and_free
    given: Any = [{"prompt_token_ids": prompt}]
    tokens: list[int] = []
    if llm.model_config.runner_type == "pooling":
        logprobs = list(llm.embed(given, use_tqdm=False)[0].outputs.embedding)
    else:
        sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False, ignore_eos=True)
        (output,) = llm.generate(given, sampling, use_tqdm=False)
        (completion,) = output.outputs
        tokens = list(completion.token_ids)
        steps = completion.logprobs or []
        logprobs = [step[token].logprob for token, step in zip(tokens, steps, strict=True)]
    manager.free = free
    kv = _kv(core, blocks[-1], len(prompt)) if blocks else None
    if kv is not None:
        np.save(kv_path, kv)
    return {
        "fingerprint": "+".join(spec.fingerprint().hex() for spec in specs),
        "without": {rule: _fingerprint_without(core, rule) for rule in without},
        "in_doubt": any(map(identity.is_in_doubt, specs)),
        "tokens": tokens,
        "logprobs": logprobs,
        "has_kv": kv is not None,
    }


def _kv(core: Any, block_ids: tuple[list[int], ...], num_tokens: int) -> np.ndarray | None:
    """KV of whole blocks of every layer, as one row of numbers; None if the worker lives in another process."""
    worker = getattr(getattr(core.model_executor, "driver_worker", None), "worker", None)
    if worker is None:
        return None
    config, layers = core.scheduler.kv_cache_config, worker.model_runner.compilation_config.static_forward_context
    found: list[np.ndarray] = []
    for ids, group in zip(block_ids, config.kv_cache_groups, strict=True):
        kept = [block for block in ids[: num_tokens // group.kv_cache_spec.block_size] if block]  # 0 is the null block.
        for name in group.layer_names:
            cache = layers[name].kv_cache
            parts = cache.shape[0] // config.num_blocks  # Kernels may divide blocks.
            rows = [block * parts + part for block in kept for part in range(parts)]
            found.append(cache[rows].float().cpu().numpy().ravel())
    return np.concatenate(found)


def _fingerprint_without(core: Any, rule: str) -> str:
    scheduler = core.scheduler
    config = scheduler.connector.scheduler_side.stages._config
    with broken(rule):
        return identity.namespace_spec(scheduler.vllm_config, scheduler.kv_cache_config, config).fingerprint().hex()


@contextmanager
def broken(rule: str) -> Iterator[None]:
    """Takes one rule out of the namespace.

    Args:
        rule: "file PATTERN", "environment.NAME" or "class".
    """
    with pytest.MonkeyPatch.context() as patch:
        if rule.startswith("file "):
            patch.setattr(weights, "_NO_KV", {**weights._NO_KV, "broken": (rule.removeprefix("file "),)})
        elif rule.startswith("environment."):
            name = rule.removeprefix("environment.")
            variables = {(kv_fields.Effect.NONE, "broken"): (name,), **kv_fields.VARIABLES}
            patch.setattr("vllm_plugin.model.kv_fields.VARIABLES", variables)
        else:
            assert rule == "class", f"unknown rule {rule}"
            patch.setattr("vllm_plugin.model.identity.own_classes", lambda vllm_config: [])
        yield
