"""How an engine's blocks are named in the pool: by vLLM's block hash and the content of the request's LoRA adapter."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvpool.types import BlockRun
from vllm_plugin.model.adapters import NO_ADAPTER, Adapters, named
from vllm_plugin.model.kinds import Kind

if TYPE_CHECKING:
    from vllm.v1.request import Request


class BlockNames:
    """Those of one engine.

    Args:
        hash_tokens: tokens that one of vLLM's block hashes covers.
    """

    def __init__(self, hash_tokens: int, adapters: Adapters):
        self.hash_tokens = hash_tokens
        self._adapters = adapters
        self._asked_at: dict[str, float] = {}  # Request -> first question since it last had blocks, `time.time`.

    def are_known(self, request: Request) -> bool:
        """Whether a request's blocks can be shared: it has no adapter, or one whose content is known."""
        return request.lora_request is None or self._adapters.digest(request.lora_request) is not None

    def are_current(self, request: Request) -> bool:
        """Whether they are known, and the adapter's files were checked since the request first asked to be admitted.

        While it did not run, ranks may have dropped its adapter, and load what the files hold now.
        """
        if request.lora_request is None:
            return True
        since = self._asked_at.setdefault(request.request_id, time.time())
        return self.are_known(request) and self.are_checked(request, since)

    def are_checked(self, request: Request, since: float) -> bool:
        """Whether the files of a request's adapter were checked after `since` (`time.time`)."""
        return request.lora_request is None or self._adapters.is_checked(request.lora_request, since)

    def admitted(self, request_id: str) -> None:
        """A request was given blocks, or has ended."""
        self._asked_at.pop(request_id, None)

    def are_coming(self, request: Request) -> bool:
        """Whether blocks that are not current will soon be: the adapter's files are being read or checked."""
        return request.lora_request is not None and self._adapters.is_busy(request.lora_request)

    def adapter(self, request: Request) -> bytes:
        """The digest of a request's adapter, which must be known."""
        digest = self._adapters.digest(request.lora_request)
        assert digest is not None, "the digest of the request's LoRA adapter is not known"
        return digest

    def run(self, request: Request, group_idx: int, kind: Kind, first: int, stop: int) -> BlockRun:
        """Blocks [first, stop) of a request. A block of several hash units is named by the last of them."""
        ratio = kind.block_tokens // self.hash_tokens
        hashes, adapter = request.block_hashes, self.adapter(request)
        units = hashes[first:stop] if ratio == 1 else [hashes[(idx + 1) * ratio - 1] for idx in range(first, stop)]
        parent = [hashes[first * ratio - 1]] if first else []
        if adapter == NO_ADAPTER:
            return BlockRun(group_idx, units, parent[0] if parent else b"")
        return BlockRun(group_idx, named(units, adapter), named(parent, adapter)[0] if parent else b"")
