"""Loads of the scheduler's side: which hits are worth it, which the engine has room for, and which are under way."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.namespace import NamespaceSpec
from vllm_plugin.metadata import LoadJob
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.groups import Group
from vllm_plugin.model.hit_rules import Reach
from vllm_plugin.scheduler.load_policy import LoadPolicy, Verdict

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


LINE_PATIENCE_S = 1.0
"""The first in line asks at every step in which there is room for requests; one that does not is waiting for another
thing."""


@dataclass(slots=True)
class Loading:
    """A load under way.

    Args:
        started_at: monotonic seconds.
        num_tokens, nbytes: what is loaded; bytes of one rank.
        is_probe: see `Verdict`.
        num_blocks: of the engine, that its request needs if the load fails.
    """

    job: LoadJob
    started_at: float
    num_tokens: int
    nbytes: int
    is_probe: bool
    num_blocks: int


class Loads:
    """Those of one engine.

    Args:
        specs: one a pipeline stage; empty until the stages are known.
        decline: whether hits that are slower than computing are declined.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        specs: Sequence[NamespaceSpec],
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        decline: bool,
        recorder: Recorder,
    ):
        self._groups = groups
        self._specs = specs
        self._tp_size = vllm_config.parallel_config.tensor_parallel_size
        self._step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._num_blocks = kv_cache_config.num_blocks
        self._decline = decline
        self._loading: dict[str, Loading] = {}
        self._first_in_line = ""
        self._in_line_at = 0.0
        self.load_policy = LoadPolicy(recorder)

    def __len__(self) -> int:
        return len(self._loading)

    def verdict(self, start: int, stop: int) -> Verdict:
        """Whether a hit is worth loading, from token `start` to boundary `stop`."""
        if not self._decline:
            return Verdict(True, math.inf, 0.0)
        return self.load_policy.verdict(stop - start, self._nbytes(start, stop))

    def has_room(self, request: Request) -> bool:
        """Whether all loads could fail, with this one, and every request still find its blocks.

        vLLM computes the first request whose load failed before it looks at the next. If that one needs more blocks
        than it had (what lies before a window is not loaded, but computed) and others that load hold the rest, none of
        them ever lets go. Who is refused is the first in line: others, with smaller loads, would overtake it for ever.
        """
        now = time.monotonic()
        if self._first_in_line not in ("", request.request_id) and now - self._in_line_at < LINE_PATIENCE_S:
            return False
        loading = sum(load.num_blocks for load in self._loading.values())
        has_room = not loading or loading + self.blocks_to_compute(request) < self._num_blocks
        self._first_in_line, self._in_line_at = "" if has_room else request.request_id, now
        return has_room

    def leave_line(self, request_id: str) -> None:
        """A request does not wait for room any more."""
        if self._first_in_line == request_id:
            self._first_in_line = ""

    def begin(self, request: Request, job: LoadJob, start: int, stop: int, is_probe: bool) -> None:
        """A load of tokens [start, stop) is on its way to the workers."""
        nbytes, num_blocks = self._nbytes(start, stop), self.blocks_to_compute(request)
        self._loading[job.request_id] = Loading(job, time.monotonic(), stop - start, nbytes, is_probe, num_blocks)

    def ended(self, request_id: str, succeeded: bool) -> LoadJob | None:
        """Every rank has reported a request's load; None if there is none."""
        load = self._loading.pop(request_id, None)
        if load is None:
            return None
        seconds = time.monotonic() - load.started_at
        self.load_policy.load_ended(load.num_tokens, load.nbytes, seconds, succeeded, load.is_probe)
        return load.job

    def _nbytes(self, start: int, stop: int) -> int:
        """Bytes that one rank loads of a hit."""
        total = 0
        for group, spec in zip(self._groups, self._specs[0].groups, strict=True):
            first = max(group.rule.first(stop), start // group.rule.block_tokens)
            total += (stop // group.rule.block_tokens - first) * spec.slot_bytes
        return total // self._tp_size

    def blocks_to_compute(self, request: Request) -> int:
        """The most blocks that a request needs at once if all of it is computed, step by step."""
        total = 0
        for group in self._groups:
            rule, num_tokens = group.rule, request.num_tokens
            if rule.reach is not Reach.ALL:
                num_tokens = min(num_tokens, rule.reach_tokens + self._step_tokens + rule.block_tokens)
            total += -(-num_tokens // rule.block_tokens) * len(group.members)
        return total
