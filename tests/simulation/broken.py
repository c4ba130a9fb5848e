"""Connectors that are broken, each in one way that a real one was or could be. The simulation must find every one.

Each is a function that patches the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvpool.client import Client
from kvpool.types import BlockRun, ShardRange
from vllm_plugin import lookups, scheduler, transfer, worker
from vllm_plugin.lookups import Lookups
from vllm_plugin.metadata import GroupBlocks, LoadJob, StoreJob
from vllm_plugin.pins import Pins
from vllm_plugin.scheduler import KVPoolScheduler
from vllm_plugin.stores import Stores
from vllm_plugin.transfer import ReceiveThread, SendThread, TransferThread

Break = Callable[[pytest.MonkeyPatch], None]
BROKEN: list[Break] = []


def variant(broken: Break) -> Break:
    BROKEN.append(broken)
    return broken


class _Longer:
    """A request that seems to have one token more."""

    def __init__(self, request: Any):
        self._request = request
        self.num_tokens = request.num_tokens + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _Forgetful(set[str]):
    def add(self, element: str) -> None:
        """Nothing."""


# Blocks of the engine


@variant
def stores_do_not_pin(patch: pytest.MonkeyPatch) -> None:
    def pin(self: Pins, job_id: int, block_ids: Sequence[int]) -> None:
        self._jobs[job_id] = ([], self._world_size)

    patch.setattr(Pins, "pin", pin)


@variant
def blocks_are_free_once_the_first_rank_has_stored(patch: pytest.MonkeyPatch) -> None:
    original = Pins.report

    def report(self: Pins, job_id: int, ranks: int) -> bool:
        return job_id in self._jobs and original(self, job_id, self._jobs[job_id][1])

    patch.setattr(Pins, "report", report)


@variant
def blocks_are_stored_before_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    original = Stores._store_job

    def store_job(self: Stores, request_id: str, num_tokens: int, state: Any) -> StoreJob | None:
        return original(self, request_id, num_tokens + 16, state)

    patch.setattr(Stores, "_store_job", store_job)


@variant
def pins_are_leaked_by_failed_stores(patch: pytest.MonkeyPatch) -> None:
    original = TransferThread.take_ended

    def take_ended(self: Any) -> list[tuple[Any, bool]]:
        return [ended for ended in original(self) if ended[1] or not isinstance(self, SendThread)]

    patch.setattr(TransferThread, "take_ended", take_ended)


# Hits


@variant
def a_hit_covers_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    original = Lookups.boundary
    patch.setattr(Lookups, "boundary", lambda self, request, local: original(self, _Longer(request), local))


@variant
def states_are_named_by_position(patch: pytest.MonkeyPatch) -> None:
    original = Stores._states

    def states(self: Stores, request: Any, idx: int, offers: Any, written: int, room: int) -> Any:
        size = self._groups[idx].rule.block_tokens
        moved = [(member, block_id, max(size, boundary - size)) for member, block_id, boundary in offers]
        return original(self, request, idx, moved, written, room)

    patch.setattr(Stores, "_states", states)


# Loads


@variant
def a_failed_load_is_looked_up_again(patch: pytest.MonkeyPatch) -> None:
    original = KVPoolScheduler.__init__

    def init(self: KVPoolScheduler, *arguments: Any) -> None:
        original(self, *arguments)
        self._failed = _Forgetful()

    patch.setattr(KVPoolScheduler, "__init__", init)


@variant
def a_failed_load_counts_as_done(patch: pytest.MonkeyPatch) -> None:
    original = ReceiveThread._transfer

    def transfer(self: ReceiveThread, job: LoadJob, mark: Any) -> bool:
        original(self, job, mark)
        return True

    patch.setattr(ReceiveThread, "_transfer", transfer)


@variant
def blocks_that_are_gone_count_as_loaded(patch: pytest.MonkeyPatch) -> None:
    original = ReceiveThread._get
    patch.setattr(ReceiveThread, "_get", lambda self, *arguments: original(self, *arguments) * 0)


@variant
def loads_are_reported_twice(patch: pytest.MonkeyPatch) -> None:
    def take_ended(self: Any) -> list[tuple[Any, bool]]:
        ended = list(self._ended)
        if isinstance(self, SendThread) or len(ended) > 1:
            self._ended.clear()
        return ended

    patch.setattr(TransferThread, "take_ended", take_ended)


@variant
def failed_loads_are_never_reported(patch: pytest.MonkeyPatch) -> None:
    original = TransferThread.take_ended

    def take_ended(self: Any) -> list[tuple[Any, bool]]:
        return [ended for ended in original(self) if ended[1] or isinstance(self, SendThread)]

    patch.setattr(TransferThread, "take_ended", take_ended)


@variant
def checksums_say_nothing(patch: pytest.MonkeyPatch) -> None:
    def no_checksums(region: Any, chunk_bytes: int) -> list[int]:
        return [0] * (len(region) // chunk_bytes)

    from kvpool import client

    patch.setattr(client, "_chunk_checksums", no_checksums)


@variant
def a_restart_goes_unnoticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Client, "_check_boot", lambda self, namespace, boot_token: None)


@variant
def the_first_block_of_a_load_is_left_out(patch: pytest.MonkeyPatch) -> None:
    original = KVPoolScheduler._load_parts

    def load_parts(self: KVPoolScheduler, *arguments: Any) -> list[GroupBlocks] | None:
        parts = original(self, *arguments)
        for part in parts or ():
            (run,) = part.runs
            if len(run) > 1:
                part.runs = [BlockRun(run.group_idx, run.block_hashes[1:], run.block_hashes[0])]
                part.block_ids = [row[1:] for row in part.block_ids]
        return parts

    patch.setattr(KVPoolScheduler, "_load_parts", load_parts)


@variant
def jobs_are_reported_before_they_end(patch: pytest.MonkeyPatch) -> None:
    submit, run_one = TransferThread.submit, TransferThread.take_ended

    def early(self: Any, job: Any) -> None:
        submit(self, job)
        self.__dict__.setdefault("early", []).append((job, True))

    def take_ended(self: Any) -> list[tuple[Any, bool]]:
        run_one(self)
        return self.__dict__.pop("early", [])

    patch.setattr(TransferThread, "submit", early)
    patch.setattr(TransferThread, "take_ended", take_ended)


# Leases and lookups


@variant
def leases_of_loads_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lookups, "release", lambda self, lease_ids: None)


@variant
def leases_of_late_answers_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lookups, "_release_late", lambda session, pending: None)


@variant
def leases_of_earlier_answers_are_kept(patch: pytest.MonkeyPatch) -> None:
    original = Lookups._take_answers

    def take_answers(self: Lookups, sought: Any, answers: Any) -> None:
        sought.lease_ids = ()
        original(self, sought, answers)

    patch.setattr(Lookups, "_take_answers", take_answers)


@variant
def aborted_requests_keep_their_lookup(patch: pytest.MonkeyPatch) -> None:
    original = KVPoolScheduler.request_finished

    def request_finished(self: KVPoolScheduler, request: Any) -> None:
        with pytest.MonkeyPatch.context() as without:
            without.setattr(self._lookups, "forget", lambda request_id: None)
            original(self, request)

    patch.setattr(KVPoolScheduler, "request_finished", request_finished)


# Ranks and namespaces


@variant
def every_rank_stores_the_first_shards(patch: pytest.MonkeyPatch) -> None:
    original = worker.rank_shards

    def rank_shards(group: Any, tp_rank: int, tp_size: int) -> Any:
        mine = original(group, tp_rank, tp_size)
        return replace(mine, shards=ShardRange(0, mine.shards.count))

    patch.setattr(worker, "rank_shards", rank_shards)


@variant
def one_store_in_pieces_begins_at_its_first_block_each_time(patch: pytest.MonkeyPatch) -> None:
    original = transfer.GroupBlocks.pieces
    patch.setattr(
        transfer.GroupBlocks,
        "pieces",
        lambda self, max_blocks: ((0, runs) for _, runs in original(self, max_blocks)),
    )


@variant
def a_reset_keeps_what_was_stored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler.KVPoolScheduler, "reset", lambda self: True)
