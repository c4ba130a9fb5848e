"""Made-up traces, each of one shape of traffic, by a seed: what a policy of eviction must not spoil.

Blocks are ids, equal where prefixes are equal, as in the trace of `benchmarks.cases.replay`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.replay.request import Request

REQUESTS_A_SECOND = 3.4
"""As in the Mooncake trace."""


def system_prompts(count: int = 8_000, seed: int = 0) -> list[Request]:
    """Forty applications, some used much more than others: each a prompt of 20 to 60 blocks that all its requests
    share, before 1 to 8 blocks of their own."""
    picks, ids = random.Random(seed), itertools.count()
    prompts = [_new(ids, picks.randint(20, 60)) for _ in range(40)]
    weights = [1 / (1 + rank) for rank in range(len(prompts))]
    return _timed(picks.choices(prompts, weights)[0] + _new(ids, picks.randint(1, 8)) for _ in range(count))


def conversations(count: int = 8_000, seed: int = 0) -> list[Request]:
    """People who talk: a first prompt of 2 to 40 blocks, then with one chance in two another turn of 1 to 6 blocks,
    a minute or two later."""
    picks, ids = random.Random(seed), itertools.count()
    shared = _new(ids, 2)
    waiting: list[tuple[float, int, list[int]]] = []
    prompts: list[list[int]] = []
    order = itertools.count()
    for nth in range(count):
        now = nth / REQUESTS_A_SECOND
        if waiting and waiting[0][0] <= now:
            prompt = heapq.heappop(waiting)[2] + _new(ids, picks.randint(1, 6))
        else:
            prompt = shared + _new(ids, picks.randint(2, 40))
        prompts.append(prompt)
        if picks.random() < 0.5:
            heapq.heappush(waiting, (now + picks.lognormvariate(4.4, 0.8), next(order), prompt))
    return _timed(prompts)


def documents(count: int = 4_000, seed: int = 0) -> list[Request]:
    """Questions about documents of 50 to 400 blocks: each document is asked about for a while, and then no more."""
    picks, ids = random.Random(seed), itertools.count()
    open_documents = [_new(ids, picks.randint(50, 400)) for _ in range(30)]
    prompts = []
    for _ in range(count):
        if picks.random() < 0.05:
            open_documents[picks.randrange(len(open_documents))] = _new(ids, picks.randint(50, 400))
        prompts.append([*picks.choice(open_documents), next(ids)])
    return _timed(prompts)


def scans(count: int = 8_000, seed: int = 0) -> list[Request]:
    """Conversations, and in between batches of 500 long prompts that nobody ever asks again."""
    picks, ids = random.Random(seed), itertools.count(1 << 40)
    prompts: list[Sequence[int]] = []
    for nth, request in enumerate(conversations(count, seed)):
        prompts.append(request.ids)
        if nth % 2_000 == 1_000:
            prompts += [_new(ids, picks.randint(20, 80)) for _ in range(500)]
    return _timed(prompts)


def loops(count: int = 6_000, seed: int = 0) -> list[Request]:
    """An evaluation that goes through the same 600 prompts of 5 to 40 blocks again and again, in order."""
    picks, ids = random.Random(seed), itertools.count()
    prompts = [_new(ids, picks.randint(5, 40)) for _ in range(600)]
    return _timed(prompts[nth % len(prompts)] for nth in range(count))


WORKLOADS: Mapping[str, Callable[[], list[Request]]] = {
    "system prompts": system_prompts,
    "conversations": conversations,
    "documents": documents,
    "scans": scans,
    "loops": loops,
}


def _new(ids: Iterator[int], count: int) -> list[int]:
    return list(itertools.islice(ids, count))


def _timed(prompts: Iterator[Sequence[int]] | Sequence[Sequence[int]]) -> list[Request]:
    return [Request(nth / REQUESTS_A_SECOND, prompt) for nth, prompt in enumerate(prompts)]
