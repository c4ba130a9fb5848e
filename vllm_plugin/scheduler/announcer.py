"""Tells the server which tokens blocks stand for, where the server publishes prefixes to routers.

The scheduler's thread queues what was stored or loaded, and a thread of its own makes the calls. Nothing waits for it:
if the queue is full, or a call fails, routers do not learn of some blocks, until a request stores or loads them again.

Blocks whose hash folds in more than tokens (an adapter, images, a salt) are not announced: routers would take them for
the blocks of the same tokens without. Nor is anything where a key hides the blocks' names from the server.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvpool.errors import KVPoolError
from kvpool.rpc import Namespace
from kvpool.types import BlockRun
from vllm_plugin.guard import Guard
from vllm_plugin.metadata import GroupBlocks
from vllm_plugin.model.groups import PoolGroup
from vllm_plugin.session import Session

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool.announcer")

MAX_QUEUED = 1_024
TIMEOUT_MS = 2_000
END_S = 1.0


class Announcer:
    """One engine's.

    Args:
        groups: of the pool.
        session: of the engine's namespace; None while it is not known, or where each pipeline stage has its own.
        guard: counts unexpected errors, which end one announcement alone.
    """

    def __init__(self, groups: Sequence[PoolGroup], session: Callable[[], Session | None], guard: Guard):
        sizes = {idx: group.kind.block_tokens for idx, group in enumerate(groups) if group.kind.needs_prefix}
        self._group_idx = min(sizes, key=lambda idx: sizes[idx], default=-1)
        self._block_tokens = sizes.get(self._group_idx, 0)
        self._session = session
        self._guard = guard
        self._queue: queue.Queue[tuple[Session, Namespace, BlockRun, list[int]] | None] = queue.Queue(MAX_QUEUED)
        self._thread: threading.Thread | None = None

    def are_there(self, request: Request, groups: Sequence[GroupBlocks]) -> None:
        """Blocks of a request are in the pool: every rank has stored them, or has loaded them."""
        session = self._session()
        namespace = None if session is None else session.namespace
        if session is None or namespace is None or not namespace.wants_tokens or not _is_plain(request):
            return
        size = self._block_tokens
        for part in groups:
            if part.group_idx == self._group_idx:
                for run, first in zip(part.runs, part.firsts, strict=True):
                    tokens = request.all_token_ids[first * size : (first + len(run)) * size]
                    self._put(session, namespace, run, list(tokens))

    def _put(self, session: Session, namespace: Namespace, run: BlockRun, tokens: list[int]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvpool-announce", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((session, namespace, run, tokens))
        except queue.Full:
            logger.debug("kvpool: %d runs wait to be announced to the server; one more is left out", MAX_QUEUED)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            session, namespace, run, tokens = item
            with self._guard.part("an announcement to the pool"):
                try:
                    session.client.rpc.announce(namespace, run, tokens, TIMEOUT_MS)
                except KVPoolError as error:
                    logger.debug("kvpool: the tokens of %d blocks were not announced: %s", len(run), error)

    def close(self) -> None:
        """Ends the thread; what is queued is announced within `END_S`, or left out. Idempotent."""
        if self._thread is not None:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(timeout=END_S)
            self._thread = None


def _is_plain(request: Request) -> bool:
    """Whether the hashes of a request's blocks are of its tokens alone."""
    return not (request.lora_request or request.mm_features or request.cache_salt or request.prompt_embeds is not None)
