"""Connectors that are broken, each in one way that a real one was or could be. The simulation must find every one.

Each is a function that patches the code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest

from kvpool.client.block_io import ChunkSums
from kvpool.client.rpc import PoolRpc
from kvpool.protocol.types import BlockRun, ShardRange
from tests.support.toy.fixtures import BLOCK_TOKENS
from vllm_plugin.metadata import GroupBlocks, LoadJob, StoreJob
from vllm_plugin.scheduler import resets
from vllm_plugin.scheduler.admission import Admission
from vllm_plugin.scheduler.loads import Loads
from vllm_plugin.scheduler.lookups import Lookups
from vllm_plugin.scheduler.scheduler import KVPoolScheduler
from vllm_plugin.scheduler.store_jobs import StoreJobs
from vllm_plugin.scheduler.stores import Stores, TrackedRequest
from vllm_plugin.worker import transfer, worker
from vllm_plugin.worker.transfer import ReceiveThread, SendThread, TransferThread

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
    patch.setattr(StoreJobs, "blocks", lambda self, storing: [])


@variant
def blocks_are_free_once_the_first_rank_has_stored(patch: pytest.MonkeyPatch) -> None:
    original = StoreJobs.reported

    def reported(self: StoreJobs, job_id: int, ranks: int, has_failed: bool) -> None:
        if job_id in self._storing:
            original(self, job_id, self._num_ranks, has_failed)

    patch.setattr(StoreJobs, "reported", reported)


@variant
def blocks_are_stored_before_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    original = Stores._store_job

    def store_job(self: Stores, tracked: TrackedRequest, num_tokens: int, *rest: Any) -> StoreJob | None:
        return original(self, tracked, num_tokens + 16, *rest)

    patch.setattr(Stores, "_store_job", store_job)


@variant
def pins_are_leaked_by_failed_stores(patch: pytest.MonkeyPatch) -> None:
    original = TransferThread.take_ended

    def take_ended(self: Any) -> list[tuple[Any, bool]]:
        return [ended for ended in original(self) if ended[1] or not isinstance(self, SendThread)]

    patch.setattr(TransferThread, "take_ended", take_ended)


@variant
def stores_do_not_wait_for_the_forward_pass(patch: pytest.MonkeyPatch) -> None:
    original = TransferThread.submit

    def submit(self: TransferThread[Any], job: Any) -> None:
        with pytest.MonkeyPatch.context() as early:
            if isinstance(self, SendThread):
                early.setattr(self._copier, "mark", lambda: 0)
            original(self, job)

    patch.setattr(TransferThread, "submit", submit)


@variant
def drafts_are_stored_under_the_names_that_come_true(patch: pytest.MonkeyPatch) -> None:
    """A step's drafts count as known tokens, and their blocks get their names when the store begins."""
    after_alloc, build, transfer_job = (
        KVPoolScheduler.after_alloc,
        KVPoolScheduler.build_metadata,
        SendThread._transfer,
    )
    requests: dict[str, Any] = {}

    def noting(self: KVPoolScheduler, request: Any, *arguments: Any) -> None:
        requests[request.request_id] = request
        after_alloc(self, request, *arguments)

    def build_ahead(self: KVPoolScheduler, output: Any) -> Any:
        known = {}
        for name in output.scheduled_spec_decode_tokens:
            hashes, request = requests[name].block_hashes, requests[name]
            known[name] = len(hashes)
            count = (request.num_computed_tokens + output.num_scheduled_tokens[name]) // BLOCK_TOKENS
            hashes.extend(f"later {idx} {name}".encode() for idx in range(len(hashes), count))
        try:
            return build(self, output)
        finally:
            for name, count in known.items():
                del requests[name].block_hashes[count:]

    def name_of(block_hash: bytes) -> bytes:
        if not block_hash.startswith(b"later "):
            return block_hash
        _, idx, request_id = block_hash.decode().split(" ", 2)
        return bytes(requests[request_id].block_hashes[int(idx)])

    def transfer_named(self: SendThread, job: StoreJob, mark: Any) -> bool:
        try:
            for part in job.groups:
                part.runs = [
                    BlockRun(run.group_idx, [name_of(each) for each in run.block_hashes], name_of(run.parent_hash))
                    for run in part.runs
                ]
        except IndexError:
            return False  # They did not come true.
        return transfer_job(self, job, mark)

    patch.setattr(KVPoolScheduler, "after_alloc", noting)
    patch.setattr(KVPoolScheduler, "build_metadata", build_ahead)
    patch.setattr(SendThread, "_transfer", transfer_named)


@variant
def dropped_stores_are_free_before_every_rank_has_ended_them(patch: pytest.MonkeyPatch) -> None:
    original = StoreJobs._drop

    def drop(self: StoreJobs, storing: Any) -> None:
        original(self, storing)
        if storing.sent_step:
            blocks = self.blocks
            self._block_pool.free_blocks(blocks(storing))
            self.blocks = lambda each: [] if each is storing else blocks(each)  # type: ignore[method-assign]

    patch.setattr(StoreJobs, "_drop", drop)


# Hits


@variant
def a_hit_covers_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    original = Admission.boundary
    patch.setattr(Admission, "boundary", lambda self, request, local: original(self, _Longer(request), local))


@variant
def states_are_named_by_position(patch: pytest.MonkeyPatch) -> None:
    original = Stores._states

    def states(self: Stores, tracked: Any, idx: int, offers: Any, room: int) -> Any:
        size = self._groups[idx].kind.block_tokens
        moved = [(member, block_id, max(size, boundary - size)) for member, block_id, boundary in offers]
        return original(self, tracked, idx, moved, room)

    patch.setattr(Stores, "_states", states)
    patch.setattr(StoreJobs, "hash_of", lambda *_: ANY)


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
    patch.setattr(ChunkSums, "add", lambda self, first, regions: None)


@variant
def a_restart_goes_unnoticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PoolRpc, "check_boot", lambda self, namespace, boot_token: None)


@variant
def the_first_block_of_a_load_is_left_out(patch: pytest.MonkeyPatch) -> None:
    original = Loads.parts

    def load_parts(self: Loads, *arguments: Any) -> list[GroupBlocks] | None:
        parts = original(self, *arguments)
        for part in parts or ():
            (run,) = part.runs
            if len(run) > 1:
                part.runs = [BlockRun(run.group_idx, run.block_hashes[1:], run.block_hashes[0])]
                part.block_ids = [row[1:] for row in part.block_ids]
        return parts

    patch.setattr(Loads, "parts", load_parts)


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
    patch.setattr(Lookups, "_release_late", lambda self, session, pending: None)


@variant
def leases_of_earlier_answers_are_kept(patch: pytest.MonkeyPatch) -> None:
    original = Lookups._keep

    def keep(self: Lookups, lookup: Any, answers: Any) -> None:
        lookup.lease_ids = ()
        original(self, lookup, answers)

    patch.setattr(Lookups, "_keep", keep)


@variant
def aborted_requests_keep_their_lookup(patch: pytest.MonkeyPatch) -> None:
    original = KVPoolScheduler.request_finished

    def request_finished(self: KVPoolScheduler, request: Any, tables: Any) -> None:
        with pytest.MonkeyPatch.context() as without:
            without.setattr(self.admission, "discard", lambda request_id: None)
            original(self, request, tables)

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
    patch.setattr(resets.Resets, "reset", lambda self: True)
