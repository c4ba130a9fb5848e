"""vLLM's AsyncLLM in a process of its own: what an API server can ask of an engine, and `LLM` cannot."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from testbed.engine import BLOCK_TOKENS
from testbed.process_group import lead

TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 30.0
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_USE_SPINLOOP_EXT": "1"}
Answer = dict[str, Any]
"""{"cached": prompt tokens that were not computed, "tokens", "logprobs"}."""


class AsyncEngine(AbstractContextManager["AsyncEngine"]):
    """A running engine; as a context manager its processes are gone afterwards.

    Args:
        options: of `AsyncEngineArgs`; without `kv_cache_memory_bytes` vLLM takes most of the memory.
        log_path: gets what vLLM logs.
    """

    def __init__(self, model: Path, transfer: dict[str, Any], options: dict[str, Any], log_path: Path):
        self._log_path = log_path
        # A session of its own, so that `kill` reaches vLLM's own processes, and nobody else's.
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=lead)
        arguments = {"model": str(model), "kv_transfer_config": transfer, **options}
        self._pid = self._process.submit(os.getpid)
        self._started = self._process.submit(_start, arguments, str(log_path))

    def wait(self) -> AsyncEngine:
        """Until it has started."""
        self._started.result(TIMEOUT_S)
        return self

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **options: Any) -> list[Answer]:
        """Greedy answers to prompts submitted at once.

        Args:
            options: of `AsyncLLM.generate`.
        """
        return list(self._call(_generate, prompts, max_tokens, options))

    def generate_meanwhile(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, calls: Sequence[tuple[str, dict[str, Any]]]
    ) -> list[Answer]:
        """Greedy answers, while methods of `AsyncLLM` are called one after the other, from the first tokens on."""
        return list(self._call(_generate_meanwhile, prompts, max_tokens, calls))

    def session(self, chunks: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
        """One request whose prompt comes in chunks: the answer after each."""
        return list(self._call(_session, chunks, max_tokens))

    def ask(self, method: str, **arguments: Any) -> Any:
        """Calls a method of `AsyncLLM`."""
        return self._call(_ask, method, arguments)

    def __exit__(self, *_: object) -> None:
        try:
            if self._started.done() and self._started.exception() is None:
                self._process.submit(_run, _stop).result(STOP_TIMEOUT_S)
        except (TimeoutError, BrokenExecutor):
            pass
        os.killpg(self._pid.result(STOP_TIMEOUT_S), signal.SIGKILL)
        self._process.shutdown()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        called: Future[Any] = self._process.submit(_run, function, *arguments)
        return called.result(TIMEOUT_S)


# In the engine's process

_loop = asyncio.new_event_loop()
_engine: Any = None
_ids = itertools.count()


def _start(arguments: dict[str, Any], log_path: str) -> None:
    with open(log_path, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(ENVIRONMENT)
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    defaults = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "prefix_caching_hash_algo": "sha256_cbor",
    }

    async def start() -> None:
        global _engine
        _engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**{**defaults, **arguments}))

    _loop.run_until_complete(start())


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    return _loop.run_until_complete(function(*arguments))


async def _stop() -> None:
    _engine.shutdown()


async def _ask(method: str, arguments: dict[str, Any]) -> Any:
    return await getattr(_engine, method)(**arguments)


async def _generate(prompts: Sequence[Sequence[int]], max_tokens: int, options: dict[str, Any]) -> list[Answer]:
    return await asyncio.gather(*(_answer(each, max_tokens, asyncio.Event(), options) for each in prompts))


async def _generate_meanwhile(
    prompts: Sequence[Sequence[int]], max_tokens: int, calls: Sequence[tuple[str, dict[str, Any]]]
) -> list[Answer]:
    begun = [asyncio.Event() for _ in prompts]
    answers = [
        asyncio.create_task(_answer(each, max_tokens, event, {})) for each, event in zip(prompts, begun, strict=True)
    ]
    for event in begun:
        await event.wait()
    for method, arguments in calls:
        await _ask(method, arguments)
    return await asyncio.gather(*answers)


async def _answer(prompt: Sequence[int], max_tokens: int, begun: asyncio.Event, options: dict[str, Any]) -> Answer:
    last = None
    async for output in _engine.generate(
        {"prompt_token_ids": list(prompt)}, _sampling(max_tokens), f"request {next(_ids)}", **options
    ):
        begun.set()
        last = output
    return answer_of(last)


async def _session(chunks: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    from vllm.engine.protocol import StreamingInput

    answered = asyncio.Event()

    async def stream() -> AsyncIterator[StreamingInput]:
        for nth, chunk in enumerate(chunks):
            if nth:
                await answered.wait()
                answered.clear()
            yield StreamingInput({"prompt_token_ids": list(chunk)})

    answers: list[Answer] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    async for output in _engine.generate(stream(), _sampling(max_tokens, delta=True), f"session {next(_ids)}"):
        (completion,) = output.outputs
        tokens += completion.token_ids
        logprobs += logprobs_of(completion)
        if len(tokens) == max_tokens:
            answers.append({"cached": output.num_cached_tokens, "tokens": tokens, "logprobs": logprobs})
            tokens, logprobs = [], []
            answered.set()
    return answers


def _sampling(max_tokens: int, delta: bool = False) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if delta else RequestOutputKind.CUMULATIVE
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, logprobs=0, detokenize=False, ignore_eos=True, output_kind=kind
    )


def answer_of(output: Any) -> Answer:
    (completion,) = output.outputs
    return {
        "cached": output.num_cached_tokens,
        "tokens": list(completion.token_ids),
        "logprobs": logprobs_of(completion),
        "reason": completion.finish_reason,
    }


def logprobs_of(completion: Any) -> list[float]:
    return [step[token].logprob for token, step in zip(completion.token_ids, completion.logprobs, strict=True)]
