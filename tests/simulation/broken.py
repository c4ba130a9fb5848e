"""Connectors that are broken, each in one way that a real one was or could be. The simulation must find every one.

Each is a function that patches the code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest

from kvpool.client.rpc import PoolRpc
from kvpool.protocol.types import BlockRun, ShardRange
from kvpool.transport.chunk_sums import ChunkSums
from tests.support.toy.fixtures import BLOCK_TOKENS
from vllm_plugin.metadata import GroupBlocks, LoadJob, StoreJob
from vllm_plugin.scheduler import provenance
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


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], Break]:
    """Makes a broken connector of a function that takes the place of another one, which it is given first."""

    def add(replacement: Callable[..., Any]) -> Break:
        def broken(patch: pytest.MonkeyPatch) -> None:
            original = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))

        broken.__name__ = replacement.__name__
        return variant(broken)

    return add


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


@replaces(StoreJobs, "blocks")
def stores_do_not_pin(original: Any, self: StoreJobs, storing: Any) -> list[int]:
    return []


@replaces(StoreJobs, "reported")
def blocks_are_free_once_the_first_rank_has_stored(
    original: Any, self: StoreJobs, job_id: int, ranks: int, has_failed: bool
) -> None:
    if job_id in self._storing:
        original(self, job_id, self._num_ranks, has_failed)


@replaces(Stores, "_store_job")
def blocks_are_stored_before_they_are_computed(
    original: Any, self: Stores, tracked: TrackedRequest, num_tokens: int, *rest: Any
) -> StoreJob | None:
    return original(self, tracked, num_tokens + 16, *rest)  # type: ignore[no-any-return]


@replaces(TransferThread, "take_ended")
def pins_are_leaked_by_failed_stores(original: Any, self: Any) -> list[tuple[Any, bool]]:
    return [ended for ended in original(self) if ended[1] or not isinstance(self, SendThread)]


@replaces(TransferThread, "submit")
def stores_do_not_wait_for_the_forward_pass(original: Any, self: TransferThread[Any], job: Any) -> None:
    with pytest.MonkeyPatch.context() as early:
        if isinstance(self, SendThread):
            early.setattr(self._copier, "mark", lambda: 0)
        original(self, job)


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


@replaces(StoreJobs, "_drop")
def dropped_stores_are_free_before_every_rank_has_ended_them(original: Any, self: StoreJobs, storing: Any) -> None:
    original(self, storing)
    if storing.sent_step:
        blocks = self.blocks
        self._block_pool.free_blocks(blocks(storing))
        self.blocks = lambda each: [] if each is storing else blocks(each)  # type: ignore[method-assign]


# Hits


@replaces(Admission, "boundary")
def a_hit_covers_the_whole_prompt(original: Any, self: Admission, request: Any, local: int) -> Any:
    return original(self, _Longer(request), local)


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


@replaces(KVPoolScheduler, "__init__")
def a_failed_load_is_looked_up_again(original: Any, self: KVPoolScheduler, *arguments: Any) -> None:
    original(self, *arguments)
    self._failed = _Forgetful()


@replaces(ReceiveThread, "_transfer")
def a_failed_load_counts_as_done(original: Any, self: ReceiveThread, job: LoadJob, mark: Any) -> bool:
    original(self, job, mark)
    return True


@replaces(ReceiveThread, "_get")
def blocks_that_are_gone_count_as_loaded(original: Any, self: ReceiveThread, *arguments: Any) -> Any:
    return original(self, *arguments) * 0


@replaces(TransferThread, "take_ended")
def loads_are_reported_twice(original: Any, self: Any) -> list[tuple[Any, bool]]:
    ended = list(self._ended)
    if isinstance(self, SendThread) or len(ended) > 1:
        self._ended.clear()
    return ended


@replaces(TransferThread, "take_ended")
def failed_loads_are_never_reported(original: Any, self: Any) -> list[tuple[Any, bool]]:
    return [ended for ended in original(self) if ended[1] or isinstance(self, SendThread)]


@replaces(ChunkSums, "add")
def checksums_say_nothing(original: Any, *arguments: Any) -> None:
    """No block is compared with what was stored."""


@replaces(PoolRpc, "check_boot")
def a_restart_goes_unnoticed(original: Any, *arguments: Any) -> None:
    """No call is refused."""


@replaces(Loads, "parts")
def the_first_block_of_a_load_is_left_out(original: Any, self: Loads, *arguments: Any) -> list[GroupBlocks] | None:
    parts: list[GroupBlocks] | None = original(self, *arguments)
    for part in parts or ():
        (run,) = part.runs
        if len(run) > 1:
            part.runs = [BlockRun(run.group_idx, run.block_hashes[1:], run.block_hashes[0])]
            part.block_ids = [row[1:] for row in part.block_ids]
    return parts


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


@replaces(Lookups, "release")
def leases_of_loads_are_kept(original: Any, *arguments: Any) -> None:
    """Nothing is released."""


@replaces(Lookups, "_release_late")
def leases_of_late_answers_are_kept(original: Any, *arguments: Any) -> None:
    """Nothing is released."""


@replaces(Lookups, "_keep")
def leases_of_earlier_answers_are_kept(original: Any, self: Lookups, lookup: Any, answers: Any) -> None:
    lookup.lease_ids = ()
    original(self, lookup, answers)


@replaces(KVPoolScheduler, "request_finished")
def aborted_requests_keep_their_lookup(original: Any, self: KVPoolScheduler, request: Any, tables: Any) -> None:
    with pytest.MonkeyPatch.context() as without:
        without.setattr(self.admission, "discard", lambda request_id: None)
        original(self, request, tables)


# Ranks and namespaces


@replaces(worker, "rank_shards")
def every_rank_stores_the_first_shards(original: Any, group: Any, tp_rank: int, tp_size: int) -> Any:
    mine = original(group, tp_rank, tp_size)
    return replace(mine, shards=ShardRange(0, mine.shards.count))


@replaces(transfer.GroupBlocks, "pieces")
def one_store_in_pieces_begins_at_its_first_block_each_time(original: Any, self: Any, max_blocks: int) -> Any:
    return ((0, runs) for _, runs in original(self, max_blocks))


@replaces(provenance.Resets, "reset")
def a_reset_keeps_what_was_stored(original: Any, self: Any) -> bool:
    return True
