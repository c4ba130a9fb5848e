"""KV that other connectors under a MultiConnector have loaded: the pool gets none of it, nor what is computed from it.

A peer may name KV by the model's path or by tokens alone, and keep it for longer than the weights; its load may fail,
which is known only once others have read the blocks. The namespace of the pool promises KV of these weights.

So a request with tokens that a peer has loaded stores nothing, and its blocks from there on are marked. A request that
finds a marked block in the engine's own cache stores nothing either, and its blocks from there on are marked, too. A
block loses its mark when a request without marked blocks is given it to write.

vLLM tells a connector what it may load itself, and not what others do. That is seen in the tokens that vLLM counts as
computed, beyond those that it had itself when it asked. Without a load they can only be the part of a cached block,
which vLLM then copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_plugin.model.groups import PoolGroup
from vllm_plugin.scheduler.stores import Stores

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool.peer_loads")

Tables = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that was given blocks.

    Args:
        local: tokens that the engine had itself; None: vLLM has not asked, since the request's load has ended.
        num_loaded: tokens that kvpool loads.
    """

    request: Request
    local: int | None
    num_loaded: int

    @property
    def exceeds(self) -> bool:
        """Whether vLLM counts more tokens as computed than the engine had, and kvpool loads none."""
        return self.local is not None and not self.num_loaded and self.request.num_computed_tokens > self.local


class PeerLoads:
    """Finds KV that other connectors have loaded into an engine's blocks, and keeps it out of the pool.

    Args:
        stores: told which requests store nothing.
    """

    def __init__(self, groups: Sequence[PoolGroup], stores: Stores):
        self._groups = groups
        self._stores = stores
        self._admitted: dict[str, Admitted] = {}  # Since the last step.
        self._marked: set[int] = set()  # Blocks, by id.
        self._first: dict[str, int] = {}  # Request with marked blocks -> the first token that is in one.

    @property
    def _is_behind(self) -> bool:
        return bool(self._marked or self._first) or any(each.exceeds for each in self._admitted.values())

    def missed_step(self) -> bool:
        """A step's `prepare` has failed, or was not called; returns whether blocks may lack a mark."""
        is_behind = self._is_behind
        self._admitted.clear()
        return is_behind

    def admitted(self, request: Request, local: int | None, num_loaded: int) -> None:
        """A request was given blocks; see `Admitted`."""
        self._admitted[request.request_id] = Admitted(request, local, num_loaded)

    def finished(self, request_id: str) -> None:
        self._admitted.pop(request_id, None)
        self._first.pop(request_id, None)

    def prepare(self, output: SchedulerOutput) -> None:
        """Marks the blocks of a step, before its stores are built, in vLLM's order: one may share those before it."""
        state = output.kv_connector_block_state
        if state is not None and self._is_behind:
            running = output.scheduled_cached_reqs
            for request_id, rows in zip(running.req_ids, running.new_block_ids, strict=True):
                if rows and request_id not in self._admitted:
                    change = self._marked.update if request_id in self._first else self._marked.difference_update
                    change(*rows)
            self._marked.discard(0)
            copies = output.kv_cache_block_copies or ()
            for copy in copies:
                change_one = self._marked.add if copy.src_block_id in self._marked else self._marked.discard
                change_one(copy.dst_block_id)
            copied = {copy.dst_block_id for copy in copies}
            for request_id, admitted in self._admitted.items():
                self._judge(admitted, state.resolve_block_ids(request_id), copied)
        self._admitted.clear()

    def _judge(self, admitted: Admitted, tables: Tables, copied: set[int]) -> None:
        request, local = admitted.request, admitted.local
        request_id, first = request.request_id, self._first.get(request.request_id)
        if local is not None:
            exceeds = admitted.exceeds
            if exceeds and any(not copied.isdisjoint(row) for row in self._from(tables, local)):
                exceeds, local = False, request.num_computed_tokens
            first = self._first_marked(tables, local)
            if first is None and exceeds:
                first = local
        if first is None:
            if self._first.pop(request_id, None) is not None:
                self._stores.allow(request_id)
            self._marked.difference_update(*tables)
            return
        if not self._marked:
            logger.info("kvpool: another connector loads KV: requests that have such KV store nothing in the pool")
        self._first[request_id] = first
        self._stores.forbid(request_id)
        self._marked.update(*self._from(tables, first))
        self._marked.discard(0)

    def _from(self, tables: Tables, first: int) -> list[Sequence[int]]:
        """The blocks of a request from its token `first` on."""
        return [
            tables[member][first // group.kind.block_tokens :] for group in self._groups for member in group.members
        ]

    def _first_marked(self, tables: Tables, local: int) -> int | None:
        """The first token of the first marked block among those that hold a request's first `local` tokens.

        Where a request has just been given its blocks, those of states are at their positions, too.
        """
        sizes = [(group.kind.block_tokens, member) for group in self._groups for member in group.members]
        marked = (
            nth * size
            for size, member in sizes
            for nth, block_id in enumerate(tables[member][: -(-local // size)])
            if block_id in self._marked
        )
        return min(marked, default=None)
