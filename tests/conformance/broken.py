"""Connectors that each break one rule: the reference connector with one thing wrong.

Connectors that break a rule by being imported are in modules of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tests.conformance.reference import Load, Metadata, ReferenceConnector, SharedStore, Store, WorkerMetadata


@dataclass(frozen=True, slots=True)
class Broken:
    """Args:
    scenario: in which the rule is broken.
    also: rules that cannot but be broken with it.
    """

    connector: str
    scenario: str
    also: frozenset[str]


BROKEN: dict[str, Broken] = {}
CRASH = "engine-survives"
STUCK = "every-request-ends"
LEAK = ("a-drained-engine-has-no-block-in-use", "a-drained-engine-can-reset-its-cache")
SLOW_S = 0.3


def breaks(rule: str, *also: str, scenario: str = "cold") -> Callable[[type], type]:
    def add(connector: type) -> type:
        assert rule not in BROKEN, f"{rule} is broken twice"
        BROKEN[rule] = Broken(connector.__name__, scenario, frozenset(also))
        return connector

    return add


# Any hook


@breaks("no-hook-raises", CRASH)
class Raises(ReferenceConnector):
    def on_new_request(self, request: Any) -> None:
        self.seen = True

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if hasattr(self, "seen"):
            raise KeyError("a ledger without the entry")


@breaks("engine-survives", "match-stays-within-the-request")
class OffersMoreThanThereIs(ReferenceConnector):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return request.num_tokens + self.block_tokens, True


@breaks("hooks-do-not-block")
class Blocks(ReferenceConnector):
    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self.step == 4:
            time.sleep(SLOW_S)


@breaks("every-request-is-answered")
class TouchesTheRequest(ReferenceConnector):
    def on_new_request(self, request: Any) -> None:
        request.max_tokens -= 1


# Matches


@breaks("match-is-well-formed")
class AnswersNoBool(ReferenceConnector):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return count, is_async or None  # type: ignore[return-value]


@breaks("match-of-nothing-is-not-asynchronous", CRASH)
class AlwaysAsynchronous(ReferenceConnector):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return super().get_num_new_matched_tokens(request, num_computed_tokens)[0], True


@breaks("match-is-idempotent")
class AnswersOnce(ReferenceConnector):
    asked = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.asked += 1
        if count and count > self.block_tokens and self.asked % 2 == 0:
            count -= self.block_tokens
        return count, is_async


@breaks("match-takes-no-reference")
class PinsWhatItMatches(ReferenceConnector):
    matched = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.pool.touch([self.pool.blocks[-1]])
        self.matched += 1
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.pool.free_blocks([self.pool.blocks[-1]] * self.matched)
        self.matched = 0
        return super().build_connector_meta(scheduler_output)


@breaks("match-stays-within-the-request", CRASH)
class LeavesNoToken(ReferenceConnector):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return request.num_tokens - num_computed_tokens, False


@breaks("no-match-after-a-failed-load", scenario="warm")
class AsksAgain(ReferenceConnector):
    def load(self, job: Load) -> bool:
        tried = self.__dict__.setdefault("tried", set())
        succeeds = job.request_id in tried and super().load(job)
        tried.add(job.request_id)
        return succeeds

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        self.failed.clear()


@breaks("a-reset-forgets", scenario="reset-of-connector")
class ResetsNothing(ReferenceConnector):
    def reset_cache(self) -> bool | None:
        return True


@breaks("a-warm-run-hits", scenario="warm")
class SharesNothing(ReferenceConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.shared = self.stores_by_name.setdefault(vllm_config.kv_transfer_config.engine_id, SharedStore())


@breaks("hit-sources-add-up", scenario="warm")
class CountsTooMany(ReferenceConnector):
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens + 1}


@breaks("loaded-groups-exist", CRASH, scenario="warm")
class LoadsAnotherGroup(ReferenceConnector):
    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (0, 7)


# Loads


@breaks("no-unknown-load-is-reported", CRASH)
class ReportsSomebody(ReferenceConnector):
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if self.step > 3:
            results.finished_recving.add("somebody")
        return results


@breaks("a-load-is-reported-once", CRASH, scenario="warm")
class ReportsTwice(ReferenceConnector):
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        last: set[str] = getattr(self, "last", set())
        self.last = set(results.finished_recving)
        results.finished_recving |= last
        return results


@breaks("every-load-is-reported", STUCK)
class ForgetsLoads(ReferenceConnector):
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        super().get_transfer_results(finished_req_ids)
        return KVConnectorTransferResults()


@breaks("a-failed-load-is-a-finished-one", scenario="failed-loads")
class ReportsFailureFirst(ReferenceConnector):
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        later: set[str] = getattr(self, "later", set())
        self.later = set(results.failed_recving)
        results.finished_recving = (results.finished_recving - results.failed_recving) | later
        return results


@breaks("load-errors-are-of-loads")
class BlamesOthers(ReferenceConnector):
    def get_block_ids_with_load_errors(self) -> set[int]:
        return {len(self.kv[0]) - 1}


# Stores, ends


@breaks("a-send-is-promised-before", CRASH)
class SendsUnasked(ReferenceConnector):
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_sending |= finished_req_ids
        return results


class Promises(ReferenceConnector):
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return True, super().request_finished_all_groups(request, block_ids)[1]


@breaks("every-promise-is-kept", STUCK)
class NeverSends(Promises):
    pass


@breaks("an-aborted-load-is-not-sent", CRASH, scenario="abort-at-each-stage")
class SendsWhatItLoads(Promises):
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_sending |= finished_req_ids
        return results


@breaks("request-finished-is-well-formed")
class AnswersAnObject(ReferenceConnector):
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished_all_groups(request, block_ids)
        return False, {"sent": object()}


@breaks("pending-push-work-is-said", *LEAK)
class HidesItsWork(ReferenceConnector):
    def has_pending_push_work(self) -> bool:
        return False


@breaks("an-idle-engine-has-no-pending-push-work")
class AlwaysBusy(ReferenceConnector):
    def has_pending_push_work(self) -> bool:
        return True


@breaks("every-request-ends")
class NeverKnows(ReferenceConnector):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return None, False


# Blocks


@breaks("only-loads-write")
class Scribbles(ReferenceConnector):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self.kv[0][-1] += 1


@breaks("loads-are-whole-when-reported")
class LeavesTheLastBlockOut(ReferenceConnector):
    def load(self, job: Load) -> bool:
        return super().load(Load(job.request_id, job.hashes[:-1], job.block_ids[:-1]))


@breaks("stores-read-no-reused-block", "loads-bring-the-right-bytes", scenario="preemption")
class PinsNothing(ReferenceConnector):
    def pin(self, job: Store) -> None:
        self.pinned[job.job_id] = (job, self.world_size)

    def unpin(self, job_id: int, ranks: int) -> None:
        self.shared.complete.update(self.pinned.pop(job_id)[0].hashes)


@breaks("loads-bring-the-right-bytes")
class MixesBlocksUp(ReferenceConnector):
    def load(self, job: Load) -> bool:
        return super().load(Load(job.request_id, job.hashes[::-1], job.block_ids))


@breaks("references-are-ones-own")
class GivesBackOthers(ReferenceConnector):
    lent: Any = None
    returned = False

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            # A block that is not full yet: this connector has no reference on it.
            if self.lent is None and request.max_tokens > 1 and request.num_tokens % self.block_tokens:
                table = scheduler_output.kv_connector_block_state.get_block_ids(request_id)[0]
                self.lent = self.pool.blocks[table[-1]]
                self.pool.free_blocks([self.lent])
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if self.lent and not self.returned:
            self.pool.touch([self.lent])
            self.returned = True


@breaks("the-null-block-is-left-alone", "only-loads-write")
class WritesTheNullBlock(ReferenceConnector):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self.kv[0][0] += 1


@breaks("references-change-on-the-scheduler-side")
class PinsFromTheWorker(ReferenceConnector):
    pools: ClassVar[dict[int, Any]] = {}

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self.pools[id(self.shared)] = gpu_block_pool

    def wait_for_save(self) -> None:
        super().wait_for_save()
        pool = self.pools[id(self.shared)]
        pool.touch([pool.blocks[-1]])

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        pool = self.pools[id(self.shared)]
        pool.free_blocks([pool.blocks[-1]])
        return super().get_transfer_results(finished_req_ids)


@breaks("a-drained-engine-has-no-block-in-use", LEAK[1], "pending-push-work-is-said")
class KeepsAReference(ReferenceConnector):
    def unpin(self, job_id: int, ranks: int) -> None:
        self.shared.complete.update(self.pinned.pop(job_id)[0].hashes)


@breaks("a-drained-engine-can-reset-its-cache", LEAK[0], "pending-push-work-is-said")
class KeepsOneReference(ReferenceConnector):
    def unpin(self, job_id: int, ranks: int) -> None:
        if job_id == 1:
            self.pool.touch([self.pool.blocks[self.pinned[1][0].block_ids[0]]])
        super().unpin(job_id, ranks)


# What crosses processes


@dataclass
class Unpicklable(Metadata):
    act: Any = field(default_factory=lambda: lambda: None)


@breaks("metadata-travels", CRASH)
class SendsAFunction(ReferenceConnector):
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        return Unpicklable(metadata.loads, metadata.stores) if metadata.stores else metadata


@dataclass
class WithHistory(Metadata):
    history: list[Store] = field(default_factory=list)


@breaks("jobs-are-handed-over-once")
class SendsHistory(ReferenceConnector):
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        self.__dict__.setdefault("history", []).extend(metadata.stores)
        return WithHistory(metadata.loads, metadata.stores, self.__dict__["history"])


@breaks("scheduler-output-is-left-alone")
class EditsTheOutput(ReferenceConnector):
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        scheduler_output.preempted_req_ids = {"somebody"}
        return super().build_connector_meta(scheduler_output)


@dataclass
class UnpicklableWorker(WorkerMetadata):
    act: Any = field(default_factory=lambda: lambda: None)


@breaks("worker-metadata-travels", CRASH)
class ReportsAFunction(ReferenceConnector):
    def build_connector_worker_meta(self) -> Any:
        metadata = super().build_connector_worker_meta()
        return UnpicklableWorker(metadata.ended) if metadata else None


@dataclass
class Lonely(WorkerMetadata):
    def aggregate(self, other: Any) -> Any:
        return {**self.ended, **other.ended}


@breaks("worker-metadata-adds-up")
class AggregatesToADict(ReferenceConnector):
    def build_connector_worker_meta(self) -> Any:
        metadata = super().build_connector_worker_meta()
        return Lonely(metadata.ended) if metadata else None


class Stats(KVConnectorStats):  # type: ignore[misc]
    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return self

    def reduce(self) -> dict[str, int | float]:
        return {}


@breaks("stats-travel")
class CountsObjects(ReferenceConnector):
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return Stats({"transfers": object()})


class WithEvents(ReferenceConnector):
    """Hands over a list of events once."""

    events: tuple[Any, ...] = ()

    def take_events(self) -> Iterable[Any]:
        taken, self.events = self.events, ()
        return taken


@breaks("events-are-well-formed")
class MiscountsTokens(WithEvents):
    events = (BlockStored([1, 2], None, list(range(16)), 16, None, "POOL", None),)


@breaks("events-follow-from-each-other")
class RemovesWhatNeverWas(WithEvents):
    events = (BlockRemoved([7], "POOL"),)


@breaks("events-are-taken-once")
class TellsAgain(ReferenceConnector):
    def take_events(self) -> Iterable[Any]:
        return (AllBlocksCleared(),)


@breaks("shutdown-is-idempotent")
class ShutsDownOnce(ReferenceConnector):
    def shutdown(self) -> None:
        del self.shared


# At rest


@breaks("constructor-needs-no-kv-cache", scenario="at-rest")
class WantsTheCacheAtOnce(ReferenceConnector):
    def shutdown(self) -> None:
        self.kv[0].zero_()


@breaks("shutdown-ends-threads", scenario="at-rest")
class LeavesAThread(ReferenceConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        threading.Thread(target=threading.Event().wait, args=(10,), name="left alone", daemon=True).start()


@breaks("requires-kv-delivery-is-a-bool", scenario="at-rest")
class DeliversPerhaps(ReferenceConnector):
    @property
    def requires_kv_delivery(self) -> bool:
        return None  # type: ignore[return-value]


@breaks("required-layout-is-known", scenario="at-rest")
class WantsItsOwnLayout(ReferenceConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "BLOCKS_FIRST"


@breaks("role-is-kept", scenario="at-rest")
class SwapsItsRole(ReferenceConnector):
    @property
    def role(self) -> KVConnectorRole:
        return KVConnectorRole.WORKER
