"""The process of a `testbed.serving_engine.ServingEngine`: obeys one line of JSON after the other with one of JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from typing import Any

from testbed.engine_process import arguments, totals

SHORT = 7
"""The engine's first prompts and answers, which compile its kernels, are shorter than a block and not cached."""
STATS_S = 0.3
"""The connector's statistics of the last steps come after the last answer."""
_ids = itertools.count()


async def serve(answers: Any) -> None:
    """Starts the engine that the first line describes, and obeys one command a line until standard input ends."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    lines = iter(sys.stdin.readline, "")
    spec = json.loads(next(lines))["spec"]
    started = time.monotonic()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(spec)))
    await _serve(llm, [{"at_s": 0.0, "tokens": [5] * SHORT, "max_tokens": SHORT}] * 4, started)
    print(json.dumps(time.monotonic() - started), file=answers, flush=True)
    for line in lines:
        print(json.dumps(await _obey(llm, json.loads(line))), file=answers, flush=True)
    llm.shutdown()
    os._exit(0)  # An orderly end of a large interpreter takes seconds more.


async def _obey(llm: Any, command: dict[str, Any]) -> Any:
    if "serve" in command:
        return await _serve(llm, command["serve"], command["begin"])
    if "reset" in command:
        return await llm.reset_prefix_cache(reset_connector=command["reset"])
    assert "metrics" in command, f"unknown command {command}"
    from vllm.v1.metrics.reader import get_metrics_snapshot

    await asyncio.sleep(STATS_S)
    return totals(get_metrics_snapshot())


async def _serve(llm: Any, prompts: list[dict[str, Any]], begin: float) -> list[dict[str, Any]]:
    return await asyncio.gather(*(_answer(llm, begin + each["at_s"], each) for each in prompts))


async def _answer(llm: Any, arrival: float, prompt: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        max_tokens=prompt["max_tokens"],
        temperature=0,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    await asyncio.sleep(arrival - time.monotonic())
    late_s = time.monotonic() - arrival
    ttft_s, cached, tokens = 0.0, 0, []
    async for output in llm.generate({"prompt_token_ids": prompt["tokens"]}, sampling, f"request {next(_ids)}"):
        ttft_s = ttft_s or time.monotonic() - arrival
        cached = output.num_cached_tokens or cached
        tokens += output.outputs[0].token_ids
    last_s = time.monotonic() - arrival
    return {"late_s": late_s, "ttft_s": ttft_s, "last_s": last_s, "cached_tokens": cached, "tokens": tokens}


if __name__ == "__main__":
    given = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What vLLM prints goes to the log: standard output carries answers alone.
    asyncio.run(serve(given))
