"""What vLLM demands of a connector, judged call by call: the state that the rules need, and the violations.

`checked.Checked` forwards the hooks and says what was asked and answered; `engine.CheckedEngine` says what befalls its
requests; `ownership.Ownership` watches the KV blocks. Single-threaded, as the hooks of a side are; both sides of a toy
engine are called by one thread.

Source: the docstrings of vllm/distributed/kv_transfer/kv_connector/v1/base.py, and what v1/core/sched/scheduler.py does
with the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.request import Request

RULES = frozenset((
    # Any hook, and a run as a whole.
    "no-hook-raises", "hooks-do-not-block", "engine-survives", "every-request-is-answered", "every-request-ends",
    # Matches.
    "match-is-well-formed", "match-of-nothing-is-not-asynchronous", "match-is-idempotent", "match-takes-no-reference",
    "match-stays-within-the-request", "no-match-after-a-failed-load", "a-reset-forgets", "a-warm-run-hits",
    "hit-sources-add-up", "loaded-groups-exist",
    # Loads.
    "no-unknown-load-is-reported", "a-load-is-reported-once", "every-load-is-reported",
    "a-failed-load-is-a-finished-one", "load-errors-are-of-loads",
    # Stores, and requests that end.
    "a-send-is-promised-before", "every-promise-is-kept", "an-aborted-load-is-not-sent",
    "request-finished-is-well-formed", "pending-push-work-is-said", "an-idle-engine-has-no-pending-push-work",
    # KV blocks.
    "only-loads-write", "loads-are-whole-when-reported", "stores-read-no-reused-block", "loads-bring-the-right-bytes",
    "references-are-ones-own", "the-null-block-is-left-alone", "references-change-on-the-scheduler-side",
    "a-drained-engine-has-no-block-in-use", "a-drained-engine-can-reset-its-cache",
    # What crosses processes.
    "metadata-travels", "jobs-are-handed-over-once", "scheduler-output-is-left-alone", "worker-metadata-travels",
    "worker-metadata-adds-up", "stats-travel", "events-are-well-formed", "events-follow-from-each-other",
    "events-are-taken-once", "shutdown-is-idempotent",
    # A connector at rest.
    "constructor-needs-no-kv-cache", "shutdown-ends-threads", "requires-kv-delivery-is-a-bool",
    "required-layout-is-known", "role-is-kept",
))  # fmt: skip
IDLE_METADATA_SLACK_BYTES = 64


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    detail: str


@dataclass(slots=True)
class Load:
    """A load, from `update_state_after_alloc` on.

    Args:
        blocks: blocks that the load may write, without the null block.
        ranks: ranks that have not ended the load.
    """

    request_id: str
    is_async: bool
    blocks: frozenset[int]
    ranks: set[int]
    is_aborted: bool = False


class Contract:
    """The contract of one engine's connector.

    Args:
        group_block_tokens: tokens per block, one number per KV-cache group.

    Attributes:
        times_asked: how often `get_num_new_matched_tokens` is asked where vLLM asks once.
        loads: loads that some rank has not ended.
        reached: how often something happened that a scenario is meant to reach.
    """

    times_asked = 2

    def __init__(self, group_block_tokens: Sequence[int] = (), num_ranks: int = 1):
        self.group_block_tokens = group_block_tokens
        self.num_ranks = num_ranks
        self.step = 0
        self.violations: list[Violation] = []
        self.reached: Counter[str] = Counter()
        self.loads: list[Load] = []
        self._newest: dict[str, Load] = {}
        self._loaded_blocks: set[int] = set()
        self._failed: set[str] = set()
        # Request -> tokens of the local hit, and whether the load that was offered beyond it is asynchronous.
        self._matched: dict[str, tuple[int, bool]] = {}
        # Request whose end was answered with True -> ranks that have not sent its blocks.
        self._promised: dict[str, set[int]] = {}
        self._stored_events: set[object] = set()
        self._num_idle_steps = 0
        self._idle_bytes: int | None = None

    def broke(self, rule: str, detail: object) -> None:
        assert rule in RULES, rule
        self.violations.append(Violation(rule, f"step {self.step}: {detail}"))

    # Requests

    def added(self, request_id: str) -> None:
        self._num_idle_steps = 0
        self._failed.discard(request_id)

    def aborted(self, request_id: str, is_loading: bool) -> None:
        self._num_idle_steps = 0
        self.reached["aborted"] += 1
        self.reached["aborted while loading" if is_loading else "aborted while not loading"] += 1
        if request_id in self._newest:
            self._newest[request_id].is_aborted = is_loading

    def stepped(self, num_pins: int, has_pending_work: bool) -> None:
        """While the connector holds references, the engine has to go on stepping: reports come with steps."""
        if num_pins:
            self._num_idle_steps = 0
            self.reached["held"] += 1
            if not has_pending_work:
                self.broke("pending-push-work-is-said", f"{num_pins} references and no pending work")

    def ended(self) -> None:
        """All requests have ended, or will not: what was under way must have been reported."""
        for load in self.loads:
            if load.is_async:
                self.broke("every-load-is-reported", f"{load.request_id}: not by ranks {sorted(load.ranks)}")
        for request_id, ranks in self._promised.items():
            if ranks:
                self.broke("every-promise-is-kept", f"{request_id}: not by ranks {sorted(ranks)}")

    # Matches and loads

    def matched(self, request: Request, num_local: int, answers: Sequence[Any]) -> None:
        """`get_num_new_matched_tokens` was asked once or more; the engine gets the last answer."""
        request_id, num_tokens = request.request_id, request.num_tokens
        first, answer = answers[0], answers[-1]
        count, is_async = answer
        self._matched[request_id] = num_local, bool(is_async)
        if not ((count is None or (type(count) is int and count >= 0)) and type(is_async) is bool):
            self.broke("match-is-well-formed", f"{request_id}: {answer}")
        if answer == (0, True):
            self.broke("match-of-nothing-is-not-asynchronous", f"{request_id}: {answer}")
        if first[0] is not None and first != answer:
            self.broke("match-is-idempotent", f"{request_id}: {first}, asked again {answer}")
        # A load of all tokens is cut by one later, a synchronous one has no later.
        if count and num_local + count > (num_tokens if is_async else num_tokens - 1):
            self.broke("match-stays-within-the-request", f"{request_id}: {count} at {num_local} of {num_tokens} tokens")
        if count and request_id in self._failed:
            self.broke("no-match-after-a-failed-load", f"{request_id}: {count} tokens again")

    def load_began(self, request_id: str, tables: Sequence[Sequence[int]], num_tokens: int) -> None:
        local, is_async = self._matched[request_id]
        blocks: set[int] = set()
        for block_tokens, table in zip(self.group_block_tokens, tables, strict=True):
            blocks.update(table[local // block_tokens : -(-(local + num_tokens) // block_tokens)])
        blocks.discard(0)
        load = Load(request_id, is_async, frozenset(blocks), set(range(self.num_ranks)))
        self.loads.append(load)
        self._loaded_blocks |= blocks
        self._num_idle_steps = 0
        if is_async:
            self._newest[request_id] = load
            self.reached["load"] += 1

    def synchronous_loads_ended(self, rank: int) -> None:
        for load in self.loads:
            if not load.is_async:
                load.ranks.discard(rank)
        self._forget_ended_loads()

    def reported(self, rank: int, results: Any) -> None:
        """`get_transfer_results` was answered."""
        received, sent, failed = (
            set(names or ()) for names in (results.finished_recving, results.finished_sending, results.failed_recving)
        )
        self._failed |= failed
        self.reached["failed load"] += len(failed)
        if failed - received:
            self.broke("a-failed-load-is-a-finished-one", f"rank {rank}: {failed - received}")
        for request_id in received:
            load = self._newest.get(request_id)
            if load is None:
                self.broke("no-unknown-load-is-reported", f"rank {rank}: {request_id}")
            elif rank not in load.ranks:
                self.broke("a-load-is-reported-once", f"rank {rank}: {request_id} again")
            else:
                load.ranks.remove(rank)
        for request_id in sent:
            promised, load = self._promised.get(request_id, set()), self._newest.get(request_id)
            if rank not in promised:
                self.broke("a-send-is-promised-before", f"rank {rank}: {request_id}")
            promised.discard(rank)
            if load is not None and load.is_aborted:  # Each of the two reports frees the blocks.
                self.broke("an-aborted-load-is-not-sent", f"rank {rank}: {request_id}")
        self._forget_ended_loads()

    def reported_errors(self, rank: int, block_ids: Iterable[int]) -> None:
        """`get_block_ids_with_load_errors` was answered."""
        if len(self.group_block_tokens) > 1 and block_ids:
            self.broke("load-errors-are-of-loads", f"block ids mean nothing with groups {self.group_block_tokens}")
        elif foreign := set(block_ids) - self._loaded_blocks:
            self.broke("load-errors-are-of-loads", f"rank {rank}: blocks {sorted(foreign)} are of no load")

    def finished(self, request_id: str, answer: Any, trouble: str) -> None:
        """The end of a request was answered.

        Args:
            trouble: why the answer's parameters cannot be sent.
        """
        is_pair = isinstance(answer, tuple) and len(answer) == 2 and type(answer[0]) is bool
        if not is_pair or not (answer[1] is None or isinstance(answer[1], dict)) or trouble:
            self.broke("request-finished-is-well-formed", f"{request_id}: {answer} {trouble}")
        if answer[0]:
            self._promised[request_id] = set(range(self.num_ranks))

    def _forget_ended_loads(self) -> None:
        self.loads = [load for load in self.loads if load.ranks]

    # What crosses processes

    def metadata_built(self, is_idle: bool, nbytes: int) -> None:
        """Building metadata resets it: a step in which nothing happens carries what the very first one did."""
        self._num_idle_steps = self._num_idle_steps + 1 if is_idle else 0
        if self._num_idle_steps > 1:
            self._idle_bytes = nbytes if self._idle_bytes is None else self._idle_bytes
            if nbytes > self._idle_bytes + IDLE_METADATA_SLACK_BYTES:
                self.broke("jobs-are-handed-over-once", f"{nbytes} bytes in an idle step; the first {self._idle_bytes}")

    def event_taken(self, event: Any, trouble: str) -> None:
        if trouble or not isinstance(event, KVCacheEvent):
            self.broke("events-are-well-formed", f"{event}: {trouble or 'is no KVCacheEvent'}")
        if isinstance(event, BlockStored):
            if event.token_ids and len(event.token_ids) != event.block_size * len(event.block_hashes):
                self.broke("events-are-well-formed", f"{event}: as many tokens as blocks hold")
            self._stored_events.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            if unknown := set(event.block_hashes) - self._stored_events:
                self.broke("events-follow-from-each-other", f"removed and never stored: {sorted(map(str, unknown))}")
            self._stored_events.difference_update(event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            self._stored_events.clear()
        if isinstance(event, BlockStored | BlockRemoved) and not event.block_hashes:
            self.broke("events-are-well-formed", f"{event}: no block")
