"""Hits that are computed all the same, at random, to measure what loading saves (`holdout_fraction`).

Every hit that the load policy would load, but for its probes, is assigned once: held out, or loaded. What is compared
is the assignment, as in a randomized trial: a request that was to load, and whose load failed or did not fit, counts as
loaded with all the time that it took.

A request's time to the first token begins when vLLM first asks the connector about the request, and ends when the
scheduler has processed the step that gave the token. The time includes the wait in vLLM's queue since then, the lookup,
and the load or the computation; it includes no time in the API server.

First tokens are compared between requests of one prompt, of this engine, that were assigned and sample greedily. Of the
last `MAX_PROMPTS` prompts a digest and the newest first token of each assignment is kept.

Not thread-safe: the scheduler's thread owns it.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from kvpool.reports import MAX_SIZE_CLASS
from vllm_plugin.metrics import Recorder

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_PROMPTS = 4_096
TIMES = "first_token_times"
"""Tallies `first_token_times:CLASS:HELD_OUT:count`, `:sum` and `:squares`."""
AGREEMENT = "agreement"
"""Tallies `agreement:num_mixed`, and the other fields of `Agreement`."""


@dataclass(slots=True)
class _Assigned:
    """A request without its first token.

    Args:
        began_at: monotonic seconds.
        digest: see `prompt_digest`.
    """

    request: Request
    began_at: float
    size_class: int
    is_held_out: bool
    digest: bytes | None


class Holdout:
    """One engine's.

    Args:
        fraction: share of the hits that are held out; with 0 nothing is measured.
        clock: monotonic seconds.
    """

    def __init__(self, fraction: float, recorder: Recorder, clock: Callable[[], float] = time.monotonic):
        self._fraction = fraction
        self._recorder = recorder
        self._clock = clock
        self._began: dict[str, float] = {}
        self._assigned: dict[str, _Assigned] = {}
        self._first_tokens: OrderedDict[bytes, list[int | None]] = OrderedDict()

    def __len__(self) -> int:
        """Requests that are kept."""
        return len(self._began) + len(self._assigned)

    def asked(self, request: Request) -> None:
        """vLLM asks about a request; the first time, its time begins."""
        if self._fraction and request.request_id not in self._assigned and not request.num_output_tokens:
            self._began.setdefault(request.request_id, self._clock())

    def holds_out(self, request: Request, num_tokens: int) -> bool:
        """Whether a hit of so many tokens, which would be loaded, is computed all the same. Asked once a request."""
        began_at = self._began.pop(request.request_id, None)
        if began_at is None:
            return False
        is_held_out = _draw(request.request_id) < self._fraction
        size_class = min(num_tokens.bit_length() - 1, MAX_SIZE_CLASS)
        self._assigned[request.request_id] = _Assigned(
            request, began_at, size_class, is_held_out, prompt_digest(request)
        )
        return is_held_out

    def admitted(self, request_id: str) -> None:
        """A request was given blocks: if it has no assignment now, it gets none."""
        self._began.pop(request_id, None)

    def step_ended(self) -> None:
        """A step's tokens are known: the time of the requests that have their first one ends."""
        if self._assigned:
            for each in [each for each in self._assigned.values() if each.request.num_output_tokens]:
                self._observe(each)

    def finished(self, request: Request) -> None:
        """A request has ended; one without a token is not counted."""
        self._began.pop(request.request_id, None)
        each = self._assigned.get(request.request_id)
        if each is not None and request.num_output_tokens:
            self._observe(each)
        self._assigned.pop(request.request_id, None)

    def _observe(self, each: _Assigned) -> None:
        del self._assigned[each.request.request_id]
        seconds = self._clock() - each.began_at
        name = f"{TIMES}:{each.size_class}:{each.is_held_out:d}"
        self._recorder.tally_together({f"{name}:count": 1, f"{name}:sum": seconds, f"{name}:squares": seconds**2})
        if each.digest is not None:
            self._compare(each.digest, each.request.output_token_ids[0], each.is_held_out)

    def _compare(self, digest: bytes, token: int, is_held_out: bool) -> None:
        """Compares a first token with the newest ones of the same prompt."""
        tokens = self._first_tokens.pop(digest, None) or [None, None]
        loaded, held_out = tokens
        if is_held_out:
            self._agreed("num_held_out", token, held_out)
        self._agreed("num_mixed", token, loaded if is_held_out else held_out)
        tokens[is_held_out] = token
        self._first_tokens[digest] = tokens
        if len(self._first_tokens) > MAX_PROMPTS:
            self._first_tokens.popitem(last=False)

    def _agreed(self, name: str, token: int, other: int | None) -> None:
        if other is not None:
            self._recorder.tally_together({f"{AGREEMENT}:{name}": 1, f"{AGREEMENT}:{name}_equal": token == other})


def _draw(request_id: str) -> float:
    """A number in [0, 1) that depends on the request's id alone."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8, person=b"kvpool-holdout").digest()) / (1 << 64)


def prompt_digest(request: Request) -> bytes | None:
    """A name of what decides a request's first token; None if more than its prompt and penalties decide it."""
    params = request.sampling_params
    if params is None or params.temperature != 0 or request.prompt_token_ids is None or not request.block_hashes:
        return None
    if request.prompt_embeds is not None or params.min_tokens or params.structured_outputs:
        return None
    if params.logit_bias or params.allowed_token_ids or params.bad_words:
        return None
    # The last whole block's hash has what else the KV depends on: images, the adapter, the salt.
    whole = blake2b(request.block_hashes[-1], digest_size=16)
    for feature in request.mm_features:
        whole.update(feature.identifier.encode())
    whole.update(array("q", request.prompt_token_ids).tobytes())
    whole.update(repr((params.repetition_penalty, params.presence_penalty, params.frequency_penalty)).encode())
    return whole.digest()
