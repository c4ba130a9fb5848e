"""What one cache for all engines would hit, in the requests' order: of any size, and of a pool's size.

A block is known as soon as its request has arrived, so that requests which come close together hit more here than in
any engine. The last token of a prompt is never a hit, because its logits must be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.replay import references
from benchmarks.replay.request import Request as Prompt
from benchmarks.serving.workloads import Request, prompt

VOCABULARY = 1 << 30
UNBOUNDED = 1 << 60


@dataclass(frozen=True, slots=True)
class HitTokens:
    """Prompt tokens of a workload, and how many of them hit.

    Args:
        total: all prompts' tokens.
        infinite: a cache that keeps everything.
        lru: plain least recently used.
        clairvoyant: evicts the block whose next use is farthest away.
    """

    total: int
    infinite: int
    lru: int
    clairvoyant: int


def hit_tokens(requests: Sequence[Request], block_tokens: int, capacity_tokens: int) -> HitTokens:
    """Plays the requests against caches.

    Args:
        capacity_tokens: of the bounded ones.
    """
    prompts = block_ids(requests, block_tokens)
    blocks = max(1, capacity_tokens // block_tokens)
    return HitTokens(
        sum(request.num_tokens for request in requests),
        references.lru(prompts, UNBOUNDED) * block_tokens,
        references.lru(prompts, blocks) * block_tokens,
        references.clairvoyant(prompts, blocks) * block_tokens,
    )


def block_ids(requests: Sequence[Request], block_tokens: int) -> list[Prompt]:
    """Lookups of the full blocks of each prompt without its last token, and a put where the last token ends a block.

    Ids of blocks are equal where all tokens so far are equal.
    """
    ids: dict[tuple[int, bytes], int] = {}
    prompts = []
    for request in requests:
        tokens = prompt(request, 0, VOCABULARY)
        chain, last = [], -1
        for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
            last = ids.setdefault((last, tokens[start : start + block_tokens].tobytes()), len(ids))
            chain.append(last)
        loadable = chain[: (len(tokens) - 1) // block_tokens]
        prompts.append(Prompt(request.at, loadable))
        if len(loadable) < len(chain):
            prompts.append(Prompt(request.at, chain, is_put=True))
    return prompts
