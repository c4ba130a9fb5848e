"""Requests of a service: when each arrives, which prompt it has, and how much of that is shared with earlier ones.

A prompt is a sequence of segments; equal segments hold equal tokens. A workload has the same arrivals and segments each
time. Its tokens depend on a seed, so that runs of one workload share no blocks.

Arrivals have a mean rate of one request per second; a run divides their times by its own rate.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

FIRST_TOKEN = 10
TRACE_BLOCK_TOKENS = 512
OUTPUT_TOKENS, FEWEST_OUTPUT_TOKENS = 16, 4


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt.

    Args:
        name: segments of one name hold the same tokens, as far as both reach.
    """

    name: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Args:
        at: its arrival, in seconds at one request per second.
        session: requests of one session go to one engine under sticky routing.
        max_tokens: length of the answer.
    """

    at: float
    session: int
    segments: tuple[Segment, ...]
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return sum(segment.tokens for segment in self.segments)


def prompt(request: Request, seed: int, vocabulary: int) -> npt.NDArray[np.int32]:
    """Token ids of a request's prompt, int32 [num_tokens]; `seed` sets what the segments hold."""
    parts = [
        np.random.default_rng((seed, segment.name)).integers(FIRST_TOKEN, vocabulary, segment.tokens, np.int32)
        for segment in request.segments
    ]
    return np.concatenate(parts)


def system_prompt(count: int, scale: float = 1.0) -> list[Request]:
    """One system prompt of 2,048 tokens before 512 to 1,536 of each request's own."""
    picks, names = random.Random(1), itertools.count(1)
    shared = Segment(0, _tokens(2_048, scale))
    own = (Segment(next(names), _tokens(picks.randint(512, 1_536), scale)) for _ in range(count))
    return _arriving(((segment.name, [shared, segment]) for segment in own), scale)


def documents(count: int, scale: float = 1.0) -> list[Request]:
    """Questions of 50 to 150 tokens about documents of 1,000 to 7,100 tokens; the n-th is asked about as 1 / n."""
    picks = random.Random(3)
    lengths = [_tokens(picks.randint(1_000, 7_100), scale) for _ in range(max(1, round(0.6 * count)))]
    weights = [1 / (1 + rank) for rank in range(len(lengths))]
    asked = picks.choices(range(len(lengths)), weights, k=count)
    prompts = (
        (document, [Segment(document, lengths[document]), Segment(len(lengths) + nth, _tokens(length, scale))])
        for nth, document in enumerate(asked)
        for length in [picks.randint(50, 150)]
    )
    return _arriving(prompts, scale)


def turns(count: int, scale: float = 1.0, *, common: int, first: int, turn: int, rounds: int) -> list[Request]:
    """Conversations whose turns take turns: each prompt is all before it and `turn` new tokens.

    Args:
        common, first, turn: tokens that all conversations share, of a conversation's first turn, and of each later one.
        rounds: turns of a conversation; there are as many conversations as make up `count` requests.
    """
    conversations = max(1, count // rounds)

    def prompts() -> Iterator[tuple[int, list[Segment]]]:
        for nth, conversation in itertools.product(range(rounds), range(conversations)):
            segments = [Segment(0, _tokens(common, scale))] if common else []
            for each in range(nth + 1):
                tokens = turn if each else first
                segments.append(Segment(1 + conversation * rounds + each, _tokens(tokens, scale)))
            yield conversation, segments

    return _arriving(prompts(), scale)


def unique(count: int, scale: float = 1.0, *, tokens: int) -> list[Request]:
    """Random prompts that share nothing."""
    return _arriving(((nth, [Segment(nth, _tokens(tokens, scale))]) for nth in range(count)), scale)


def trace(count: int, scale: float = 1.0, *, path: Path) -> list[Request]:
    """The first requests of a trace, with its own arrivals, stretched.

    Each line is a JSON object: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids` (one per 512
    tokens; equal ids are equal prefixes). Two requests are of one session if their second blocks are equal: the first
    block is often common to all.

    Source of the format: Qin et al., Mooncake, FAST '25.
    """
    with path.open() as file:
        lines = [json.loads(line) for line in itertools.islice(file, count)]
    period_s = max(1e-3, (lines[-1]["timestamp"] - lines[0]["timestamp"]) / 1e3 / max(1, len(lines) - 1))
    requests = []
    for line in lines:
        ids, left = line["hash_ids"], line["input_length"]
        segments = []
        for block in ids:
            segments.append(Segment(block, _tokens(min(left, TRACE_BLOCK_TOKENS), scale)))
            left -= TRACE_BLOCK_TOKENS
        at = (line["timestamp"] - lines[0]["timestamp"]) / 1e3 / period_s
        session = ids[min(1, len(ids) - 1)]
        requests.append(Request(at, session, tuple(segments), _tokens(line["output_length"], scale)))
    return requests


WORKLOADS: Mapping[str, Callable[[int, float], list[Request]]] = {
    "system prompt": system_prompt,
    "documents": documents,
    "8 turns": partial(turns, common=0, first=12_288, turn=2_048, rounds=8),
    "30 turns": partial(turns, common=20_000, first=10_000, turn=2_048, rounds=30),
    "random 1K": partial(unique, tokens=1_000),
    "random 8K": partial(unique, tokens=8_000),
    "random 20K": partial(unique, tokens=20_000),
}
"""All but the trace."""


def fitting(requests: Sequence[Request], max_model_len: int) -> list[Request]:
    """Those requests that an engine accepts, in order."""
    return [request for request in requests if request.num_tokens + request.max_tokens <= max_model_len]


def routes(requests: Sequence[Request], engines: int, *, sticky: bool) -> list[int]:
    """The engine of each request: at random, or of its session."""
    picks = random.Random(3)
    if not sticky:
        return [picks.randrange(engines) for _ in requests]
    of_session: dict[int, int] = {}
    return [of_session.setdefault(request.session, picks.randrange(engines)) for request in requests]


def _arriving(prompts: Iterator[tuple[int, list[Segment]]], scale: float) -> list[Request]:
    """Requests of (session, segments), with Poisson arrivals."""
    picks, at, requests = random.Random(4), 0.0, []
    max_tokens = max(FEWEST_OUTPUT_TOKENS, _tokens(OUTPUT_TOKENS, scale))
    for session, segments in prompts:
        requests.append(Request(at, session, tuple(segments), max_tokens))
        at += picks.expovariate(1)
    return requests


def _tokens(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))
