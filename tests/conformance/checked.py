"""A proxy around any `KVConnectorBase_V1` that forwards every hook, and tells the contract what was asked and answered.

Hooks without rules of their own, those that a later vLLM adds included, are forwarded by the same method: an error, a
long call and references to blocks are judged in each.
"""

from __future__ import annotations

import abc
import inspect
import pickle
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from tests.conformance.ownership import Ownership

SCHEDULER = -1
MATCH = "get_num_new_matched_tokens"
MAY_BLOCK = ("shutdown", "reset_cache")


class Checked(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One side of a connector. The proxy's state is the connector's, so the base's constructor is not called.

    Args:
        rank: of a worker's side, or SCHEDULER.
        hook_limit_s: how long a hook may take.
    """

    def __init__(self, inner: KVConnectorBase_V1, ownership: Ownership, rank: int, hook_limit_s: float):
        self._inner = inner
        self._ownership, self._contract = ownership, ownership.contract
        self._rank = rank
        self._hook_limit_s = hook_limit_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def _ask(self, hook: str, *args: Any, times: int = 0, **kwargs: Any) -> Any:
        """Calls a hook; the very answer is returned, or the very error raised.

        Args:
            times: how often the hook is called, for a list of answers; by default once, for one.
        """
        contract = self._contract
        references = self._ownership.references()
        started = time.monotonic()
        try:
            answers = [getattr(self._inner, hook)(*args, **kwargs) for _ in range(times or 1)]
            return answers if times else answers[0]
        except Exception as error:
            rule = "shutdown-is-idempotent" if hook == "shutdown" else "no-hook-raises"
            contract.broke(rule, f"{hook}: {type(error).__name__}: {error}")
            raise
        finally:
            seconds = time.monotonic() - started
            if seconds > self._hook_limit_s and hook not in MAY_BLOCK:
                contract.broke("hooks-do-not-block", f"{hook} took {seconds:.3f} s")
            if pinned := self._ownership.hook_ended(hook, references):
                if hook == MATCH:
                    contract.broke("match-takes-no-reference", pinned)
                if self._rank != SCHEDULER:
                    contract.broke("references-change-on-the-scheduler-side", f"{hook}: {pinned}")

    # Scheduler

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        answers = self._ask(MATCH, request, num_computed_tokens, times=self._contract.times_asked)
        self._contract.matched(request, num_computed_tokens, answers)
        answer: tuple[int | None, bool] = answers[-1]
        return answer

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> Any:
        answer = self._ask("get_external_cache_hit_sources", request, num_external_tokens)
        if sum(answer.values()) != num_external_tokens:
            self._contract.broke("hit-sources-add-up", f"{answer} for {num_external_tokens} tokens")
        return answer

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        answer: tuple[int, ...] = self._ask("get_loaded_kv_cache_group_ids", request)
        num_groups = len(self._contract.group_block_tokens)
        if not set(answer) <= set(range(num_groups)):
            self._contract.broke("loaded-groups-exist", f"{answer} of {num_groups}")
        return answer

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        self._ask("update_state_after_alloc", request, blocks, num_external_tokens)
        if num_external_tokens:
            self._contract.load_began(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        before = _digest(scheduler_output)
        is_idle = not scheduler_output.num_scheduled_tokens and not scheduler_output.finished_req_ids
        metadata = self._ask("build_connector_meta", scheduler_output)
        after = _digest(scheduler_output)
        if before != after:
            changed = [name for name in before if before[name] != after[name]]
            self._contract.broke("scheduler-output-is-left-alone", changed)
        if trouble := _trouble_of(metadata, KVConnectorMetadata):
            self._contract.broke("metadata-travels", trouble)
        else:
            self._contract.metadata_built(is_idle, len(pickle.dumps(metadata)))
        return metadata

    def request_finished(self, request: Request, block_ids: Any) -> Any:
        return self._finished("request_finished", request, block_ids)

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> Any:
        return self._finished("request_finished_all_groups", request, block_ids)

    def _finished(self, hook: str, request: Request, block_ids: Any) -> Any:
        answer = self._ask(hook, request, block_ids)
        trouble = _trouble(lambda: msgspec.msgpack.encode(answer[1]))
        self._contract.finished(request.request_id, answer, trouble)
        return answer

    def take_events(self) -> Iterable[Any]:
        events, again = map(list, self._ask("take_events", times=2))
        if again:
            self._contract.broke("events-are-taken-once", again)
        for event in events:
            self._contract.event_taken(event, _trouble(partial(msgspec.msgpack.encode, event)))
        return events

    # Worker

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        # The last moment before the step writes, and the first one after preemptions were handled.
        self._ask("bind_connector_metadata", connector_metadata)
        self._ownership.mark_new_blocks(self._rank)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self._ask("get_transfer_results", finished_req_ids)
        self._contract.reported(self._rank, results)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        block_ids: set[int] = self._ask("get_block_ids_with_load_errors")
        self._contract.reported_errors(self._rank, block_ids)
        return block_ids

    def build_connector_worker_meta(self) -> Any:
        metadata = self._ask("build_connector_worker_meta")
        if metadata is not None:
            if trouble := _trouble_of(metadata, KVConnectorWorkerMetadata):
                self._contract.broke("worker-metadata-travels", trouble)
            elif trouble := _trouble(lambda: _aggregate(metadata)):
                self._contract.broke("worker-metadata-adds-up", trouble)
        return metadata

    def get_kv_connector_stats(self) -> Any:
        stats = self._ask("get_kv_connector_stats")
        trouble = _trouble(lambda: stats and (msgspec.msgpack.encode(stats.to_dict()), pickle.dumps(stats)))
        if trouble:
            self._contract.broke("stats-travel", trouble)
        return stats


def _forward_the_others() -> None:
    for name, member in inspect.getmembers(KVConnectorBase_V1):
        if name.startswith("_") or name in vars(Checked):
            continue
        if isinstance(member, property):
            setattr(Checked, name, property(lambda self, name=name: getattr(self._inner, name)))
        elif inspect.isfunction(member):
            setattr(Checked, name, _forwarder(name))
    abc.update_abstractmethods(Checked)


def _forwarder(hook: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self._ask(hook, *args, **kwargs)


_forward_the_others()


def _trouble(attempt: Callable[[], Any]) -> str:
    """Why an attempt fails; "" if it works."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _trouble_of(metadata: object, kind: type) -> str:
    """Why metadata cannot go to another process as what vLLM expects there."""
    if not isinstance(metadata, kind):
        return f"{metadata} is no {kind.__name__}"
    return _trouble(lambda: pickle.loads(pickle.dumps(metadata)))


def _aggregate(metadata: KVConnectorWorkerMetadata) -> None:
    one, other = pickle.loads(pickle.dumps((metadata, metadata)))
    merged = one.aggregate(other)
    if not isinstance(merged, KVConnectorWorkerMetadata):
        raise TypeError(f"aggregate() answered {type(merged).__name__}")
    pickle.dumps(merged)


def _digest(output: SchedulerOutput) -> dict[str, bytes]:
    # Block tables are resolved on demand; blocks to zero may be cut by a connector that overwrites them.
    exempt = {"kv_connector_block_state", "new_block_ids_to_zero", "kv_connector_metadata"}
    return {item.name: pickle.dumps(getattr(output, item.name)) for item in fields(output) if item.name not in exempt}
