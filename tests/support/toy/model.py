"""The toy model: no weights; the KV of a token is a hash of the whole prefix up to it.

The next token is a function of that hash, so what every block must hold and what every request must answer is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.toy.cache import Tables
from tests.support.toy.fixtures import TINY

_MULTIPLIER = 6364136223846793005
_MASK = (1 << 64) - 1
_WRONG_DRAFT = 1
"""A token that the toy model never samples."""


class Sequences:
    """The toy model: tokens and prefix hashes of one request. Other weights give other hashes."""

    def __init__(self, prompt: Sequence[int], weights: int = 1):
        self._weights = weights
        self.tokens: list[int] = []
        self.hashes: list[int] = []
        self.drafts: list[int] = []
        for token in prompt:
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.hashes.append(_hash(self.hashes[-1] if self.hashes else self._weights, token))

    def next_token(self) -> int:
        return _next_token(self.hashes[-1])

    def restart(self, tokens: Sequence[int]) -> None:
        """The scheduler's tokens take the place of those sampled since; drafts are forgotten."""
        self.drafts = []
        if self.tokens != tokens:
            self.__init__(tokens, self._weights)  # type: ignore[misc]

    def draft(self, count: int) -> list[int]:
        """Guesses of the next tokens. The first few are right: how many depends on the last token."""
        at, num_right = self.hashes[-1], (self.hashes[-1] >> 40) % (count + 1)
        self.drafts = []
        for nth in range(count):
            right = _next_token(at)
            self.drafts.append(right if nth < num_right else _WRONG_DRAFT)
            at = _hash(at, self.drafts[-1])
        return self.drafts


def _hash(before: int, token: int) -> int:
    return ((before ^ token) * _MULTIPLIER + 1442695040888963407) & _MASK


def _next_token(at: int) -> int:
    return 3 + (at >> 33) % (TINY.vocab - 3)


def answer(prompt: Sequence[int], max_tokens: int, weights: int = 1) -> list[int]:
    """What the toy model answers, cold or warm."""
    model = Sequences(prompt, weights)
    for _ in range(max_tokens):
        model.append(model.next_token())
    return model.tokens[len(prompt) :]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step computes of one request.

    Args:
        tables: the request's blocks when the step was scheduled.
        start: as the scheduler reckons it; it takes drafts of the step before for accepted until it hears otherwise.
        scheduled_drafts: the last of the `count` tokens; -1 for those that the worker has drafted itself.
    """

    model: Sequences
    tables: Tables
    start: int
    count: int
    scheduled_drafts: Sequence[int] = ()

    def drafts(self) -> list[int]:
        own = [*self.model.drafts, *[_WRONG_DRAFT] * len(self.scheduled_drafts)]
        return [mine if given == -1 else given for given, mine in zip(self.scheduled_drafts, own, strict=False)]

    def first(self) -> int:
        """Position of the first token. To be asked when the steps before have been computed."""
        return min(self.start, len(self.model.tokens) - 1)

    def hashes(self) -> list[int]:
        """Of the prefix, to the end of the chunk."""
        stop = self.first() + self.count - len(self.scheduled_drafts)
        assert stop <= len(self.model.tokens), "the scheduler wants a token computed that nobody has sampled"
        if not self.scheduled_drafts:
            return self.model.hashes
        hashes = self.model.hashes[:stop]
        for draft in self.drafts():
            hashes.append(_hash(hashes[-1], draft))
        return hashes

    def sample(self) -> list[int]:
        """The next tokens: one more than there are right drafts; none before the end of the prompt."""
        if self.first() + self.count - len(self.scheduled_drafts) < len(self.model.tokens):
            return []
        sampled: list[int] = []
        for draft in [*self.drafts(), None]:
            sampled.append(self.model.next_token())
            self.model.append(sampled[-1])
            if draft != sampled[-1]:
                break
        return sampled
