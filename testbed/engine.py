"""A real vLLM engine in a process of its own, as the process that drives it sees it.

`Engine` writes one JSON command a line and reads one JSON answer a line from `testbed.engine_process`; vLLM's own
output goes to a log file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any, TypeVar

from testbed.forked_process import start_module
from vllm_plugin import BEGAN_AT

START_TIMEOUT_S = 480.0
IMPORT_SETTINGS = {"VLLM_USE_SPINLOOP_EXT": "1"}
"""Environment variables that vLLM reads while it is imported.

vLLM's processes wait for each other in a loop of sched_yield, with which Linux 6.18 lets no other process run for 20 s
and more; the extension waits in another way.
"""
BLOCK_TOKENS = 32
"""The CPU attention kernel wants multiples of 32."""


def kvpool_transfer_config(endpoint: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """What `--kv-transfer-config` gets."""
    return {
        "kv_connector": "KVPoolConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": endpoint, **extra},
    }


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with something besides its token ids.

    Args:
        lora: directory of an adapter; the engine wants `enable_lora`.
        cache_salt: prompts share blocks only if it is equal.
        embeds_seed: of random embeddings that stand in the place of the tokens, one each; wants
            `enable_prompt_embeds`.
    """

    tokens: Sequence[int]
    lora: str = ""
    cache_salt: str = ""
    embeds_seed: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine made of one prompt.

    Args:
        ttft_s: time to first token, as vLLM measures it.
        cached_tokens: prompt tokens that were not computed.
        logprobs: of the chosen tokens.
    """

    tokens: list[int]
    logprobs: list[float]
    ttft_s: float
    cached_tokens: int


@dataclass(slots=True)
class EngineSpec:
    """How to start an engine.

    Args:
        transfer: `kv_transfer_config`; None for no connector.
        options: further arguments of `vllm.LLM`.
        environment: further variables.
        in_process: scheduler and worker in the driving process: starts sooner; one rank.
    """

    model: Path
    transfer: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    in_process: bool = False


class EngineError(RuntimeError):
    """The engine did not start, died, or did not answer in time; the message ends with its log."""


class Engine:
    """A running engine. Use as a context manager: the process is gone afterwards.

    Attributes:
        MODULE: runs as the engine's process.
        start_s: seconds from the call of `vllm.LLM`, after all imports, until it was ready.
    """

    MODULE = "testbed.engine_process"

    def __init__(self, spec: EngineSpec, log_path: Path, start_timeout_s: float = START_TIMEOUT_S):
        self._log_path = log_path
        num_ranks = spec.options.get("tensor_parallel_size", 1) * spec.options.get("pipeline_parallel_size", 1)
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            # GiB; goes before `kv_cache_memory_bytes` where both are given.
            **({} if "kv_cache_memory_bytes" in spec.options else {"VLLM_CPU_KVCACHE_SPACE": "1"}),
            "VLLM_CPU_OMP_THREADS_BIND": _cores(num_ranks),
            **IMPORT_SETTINGS,
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not spec.in_process)),
            **spec.environment,
        }
        environment.pop(BEGAN_AT, None)  # Of another engine, if this process has made one.
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = start_module(self.MODULE, [], environment, log)
        self._answers: Queue[str | None] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.start_s = float(self._ask({"spec": {**asdict(spec), "model": str(spec.model)}}, start_timeout_s))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def generate(
        self, prompts: Sequence[Sequence[int] | Prompt], max_tokens: int = 8, timeout_s: float = 120.0, **options: Any
    ) -> list[Answer]:
        """Greedy answers to prompts, all submitted at once.

        Args:
            options: further arguments of `SamplingParams`.
        """
        given = [asdict(each if isinstance(each, Prompt) else Prompt(list(each))) for each in prompts]
        command = {"generate": given, "max_tokens": max_tokens, "options": options}
        return [Answer(**answer) for answer in self._ask(command, timeout_s)]

    def decode(
        self, background: Sequence[Sequence[int]], arrivals: Sequence[Sequence[int]], max_tokens: int
    ) -> list[float]:
        """Seconds between tokens of `background` prompts, while others arrive one after the other.

        Args:
            arrivals: prompts of which one token each is wanted; the next arrives when the one before is answered.
        """
        command = {"decode": [list(each) for each in background], "arrivals": [list(each) for each in arrivals]}
        return list(self._ask({**command, "max_tokens": max_tokens}, 120.0))

    def reset_prefix_cache(self, external: bool = False) -> bool:
        """Empties the engine's own prefix cache; with `external` its connector is reset, too."""
        return bool(self._ask({"reset": external}, 60.0))

    def sleep(self, level: int = 1) -> None:
        """Lets the engine sleep; in a process of its own, whatever its connector is doing."""
        self._ask({"sleep": level}, 60.0)

    def wake_up(self) -> None:
        self._ask({"wake_up": True}, 60.0)

    def call(self, function: str, *arguments: Any, timeout_s: float = 120.0) -> Any:
        """Calls `function(llm, *arguments)` in the engine's process; arguments and result travel as JSON.

        Args:
            function: as "module:name".
        """
        return self._ask({"call": function, "arguments": list(arguments)}, timeout_s)

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges, and sum and count of its histograms, over all labels; as of the last answer.

        Of series with a label `cause` also each cause's, as "name:cause"; of series with a label `source` likewise.
        """
        return dict(self._ask({"metrics": True}, 60.0))

    def log(self) -> str:
        """What the engine has logged so far."""
        return self._log_path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Process id of `testbed.engine_process`, which is also its process group."""
        return self._process.pid

    def stop(self) -> None:
        """Shuts the engine down; kills its process group if that takes too long."""
        if self._process.poll() is None:
            try:
                assert self._process.stdin is not None
                self._process.stdin.close()
                self._process.wait(timeout=30)
            except (OSError, subprocess.TimeoutExpired):
                pass
        self.kill()

    def kill(self) -> None:
        """Kills every process of the engine."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(timeout=10)

    def _ask(self, command: dict[str, Any], timeout_s: float) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=timeout_s)
        except (OSError, Empty):
            line = None
        if line is None:
            self.kill()
            tail = "\n".join(self.log().splitlines()[-40:])
            raise EngineError(f"the engine did not answer {next(iter(command))} within {timeout_s:.0f} s\n{tail}")
        return json.loads(line)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)


AnyEngine = TypeVar("AnyEngine", bound=Engine)


def start_all(
    stack: ExitStack, specs: Mapping[str, EngineSpec], logs: Path, kind: type[AnyEngine] = Engine
) -> dict[str, AnyEngine]:
    """Starts engines at the same time. Raises EngineError if one did not start; the stack stops the others.

    Args:
        stack: stops them when it ends.
        logs: folder of their logs.
    """
    started = time.monotonic()
    with ThreadPoolExecutor(len(specs)) as threads:
        starts = {
            name: threads.submit(kind, spec, logs / f"{name.replace(' ', '-')}.log") for name, spec in specs.items()
        }
    for start in starts.values():
        if start.exception() is None:
            stack.enter_context(start.result())
    engines = {name: start.result() for name, start in starts.items()}
    print(f"{', '.join(specs)}: started in {time.monotonic() - started:.0f} s", flush=True)
    return engines


def _cores(num_ranks: int) -> str:
    """All cores: "auto" leaves one idle for some configurations and not for others, which would spoil comparisons."""
    return "nobind" if num_ranks > 1 or "OMP_NUM_THREADS" in os.environ else f"0-{(os.cpu_count() or 1) - 1}"
