"""Tells the server which tokens blocks stand for, where the server publishes prefixes to routers.

Nothing waits for an announcement: if too many wait, or a call fails, routers do not learn of some blocks, until a
request stores or loads them again. A server asks those engines alone that may write. One that refuses an announcement
all the same, because the engine's credential was replaced, gets no further one until it has restarted.

Blocks whose hash folds in more than tokens (an adapter, images, a salt) are not announced: routers would take them for
the blocks of the same tokens without. Nor is anything where a key hides the blocks' names from the server.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvpool.errors import KVPoolError, PermissionDeniedError
from kvpool.principal import Role
from kvpool.rpc import Namespace, PoolRpc
from kvpool.types import BlockRun
from vllm_plugin.guard import Guard
from vllm_plugin.metadata import GroupBlocks
from vllm_plugin.model.groups import PoolGroup
from vllm_plugin.scheduler.call_queue import CallQueue
from vllm_plugin.session import Session

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool.announcer")

MAX_WAITING = 1_024
"""Runs that wait to be announced; further ones are left out."""
TIMEOUT_MS = 2_000


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
        self._refused_by = 0  # Boot token of the server that has refused an announcement.
        self._calls = CallQueue("kvpool-announce", "an announcement to the pool", MAX_WAITING, guard, _failed)

    def are_there(self, request: Request, groups: Sequence[GroupBlocks]) -> None:
        """Blocks of a request are in the pool: every rank has stored them, or has loaded them."""
        session = self._session()
        namespace = None if session is None else session.namespace
        if session is None or namespace is None or not self._is_wanted(namespace) or not _is_plain(request):
            return
        size, rpc = self._block_tokens, session.client.rpc
        for part in groups:
            if part.group_idx == self._group_idx:
                for run, first in zip(part.runs, part.firsts, strict=True):
                    tokens = list(request.all_token_ids[first * size : (first + len(run)) * size])
                    if not self._calls.put(functools.partial(self._announce, rpc, namespace, run, tokens)):
                        logger.debug("kvpool: %d blocks are not announced to the server: too many wait", len(run))

    def close(self) -> None:
        """Announces nothing any more; see `CallQueue.close`. Idempotent."""
        self._calls.close()

    def _is_wanted(self, namespace: Namespace) -> bool:
        return namespace.wants_tokens and namespace.boot_token != self._refused_by

    def _announce(self, rpc: PoolRpc, namespace: Namespace, run: BlockRun, tokens: Sequence[int]) -> None:
        if not self._is_wanted(namespace):
            return  # Refused since the call was queued.
        try:
            rpc.announce(namespace, run, tokens, TIMEOUT_MS)
        except PermissionDeniedError as error:
            self._refused_by = namespace.boot_token
            logger.warning(
                "kvpool: this engine no longer tells the server the tokens of its blocks, so routers do not learn of "
                "them from it; give the engine a certificate or token of role %s, and restart it: %s",
                Role.ENGINE_WRITE,
                error,
            )


def _failed(error: KVPoolError) -> None:
    logger.debug("kvpool: the tokens of blocks were not announced: %s", error)


def _is_plain(request: Request) -> bool:
    """Whether the hashes of a request's blocks are of its tokens alone."""
    return not (request.lora_request or request.mm_features or request.cache_salt or request.prompt_embeds is not None)
