"""Told of each request's way through the scheduler's side: for traces, which are off by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpool.causes import Cause
from vllm_plugin.scheduler.request_lookup import RequestLookup

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RequestWatcher:
    """Called on the scheduler's thread: must return at once. The methods of this class do nothing."""

    def asked(self, request: Request) -> None:
        """A request is looked up, or vLLM asks how many of its tokens can be loaded; maybe again."""

    def admitted(self, request: Request, lookup: RequestLookup | None, num_external_tokens: int) -> None:
        """A request was given blocks.

        Args:
            lookup: whose answer vLLM takes, or a part of it, or nothing; None if there was none.
            num_external_tokens: that are loaded now.
        """

    def load_ended(self, request_id: str, succeeded: bool) -> None:
        """Every rank has reported a request's load."""

    def prompt_ended(self, request: Request, causes: Mapping[Cause, int]) -> None:
        """The step that is being scheduled computes the last of a prompt, whose computed tokens have these causes."""

    def finished(self, request_id: str) -> None:
        """A request has ended."""
