"""Which blocks of a request are worth storing, in groups that need only a part of the prefix.

A group with a sliding window needs the window before a boundary and nothing else, so its blocks are stored where a
later request may resume: at the end of the prompt, everywhere in what was decoded (the next turn ends anywhere), where
this prompt parted from one that the pool knows, and at every multiple of an interval for the first that parts from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_plugin.model.hit_rules import Reach, Rule


@dataclass(frozen=True, slots=True)
class Retention:
    """One request's.

    Args:
        prompt_tokens: length of the prompt.
        alignment: of boundaries, in tokens.
        interval: tokens between boundaries that are kept whatever the prompt; a multiple of `alignment`.
        divergence: boundary where the prompt parted from what is known; 0: none.
    """

    prompt_tokens: int
    alignment: int
    interval: int
    divergence: int = 0

    def blocks(self, rule: Rule, start: int, stop: int) -> list[int]:
        """Those of blocks [start, stop) that are worth storing, in order."""
        if rule.reach is Reach.ALL:
            return list(range(start, stop))
        wanted: set[int] = set()
        for boundary in self._boundaries(start * rule.block_tokens, stop * rule.block_tokens):
            wanted.update(range(max(start, rule.first(boundary)), min(stop, rule.end(boundary))))
        decoded = self._prompt_end() // rule.block_tokens
        wanted.update(range(max(start, decoded), stop))
        return sorted(wanted)

    def _boundaries(self, start_tokens: int, stop_tokens: int) -> Iterator[int]:
        """Boundaries whose blocks may lie between two positions."""
        # From the multiple before, which the first block may have to prove, to the one that the last block leads to.
        yield from range(
            start_tokens // self.interval * self.interval,
            -(-stop_tokens // self.interval) * self.interval + 1,
            self.interval,
        )
        yield self.divergence
        # The same prompt again computes its last token; a longer one may resume after it.
        yield (self.prompt_tokens - 1) // self.alignment * self.alignment
        yield self._prompt_end()
        yield self._prompt_end() - self.alignment  # The block after it proves it where a draft model asks for that.

    def _prompt_end(self) -> int:
        return self.prompt_tokens // self.alignment * self.alignment
