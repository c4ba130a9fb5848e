"""A real vLLM engine that gets requests at their times: vLLM's `AsyncLLM` in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from testbed.engine import Engine, EngineSpec

START_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """A prompt that arrives at a time.

    Args:
        at_s: seconds after the run's begin.
        tokens: token ids.
        max_tokens: length of the answer, in tokens.
    """

    at_s: float
    tokens: Sequence[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one prompt.

    Args:
        late_s: seconds from its arrival until it was handed to the engine.
        ttft_s: seconds from its arrival to its first token.
        last_s: seconds from its arrival to its last token.
        cached_tokens: prompt tokens that were not computed.
        tokens: of the answer.
    """

    late_s: float
    ttft_s: float
    last_s: float
    cached_tokens: int
    tokens: list[int]

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first one."""
        return (self.last_s - self.ttft_s) / max(1, len(self.tokens) - 1)


class ServingEngine(Engine):
    """A running engine that serves requests in an open loop."""

    MODULE = "testbed.serving_process"

    def __init__(self, spec: EngineSpec, log_path: Path, start_timeout_s: float = START_TIMEOUT_S):
        super().__init__(spec, log_path, start_timeout_s)

    def serve(self, prompts: Sequence[TimedPrompt], begin: float, timeout_s: float) -> list[Served]:
        """Greedy answers to prompts, each submitted at its time whatever became of the others.

        Args:
            begin: the run's begin on the clock of `time.monotonic`, which processes of a host share.
        """
        command = {"serve": [asdict(prompt) for prompt in prompts], "begin": begin}
        return [Served(**served) for served in self._ask(command, timeout_s)]
