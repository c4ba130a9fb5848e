"""Where later requests may resume, which decides what blocks of a request are worth storing.

A hit needs only a part of the prefix in some groups (a sliding window: the window before the boundary). Their blocks
are stored at the boundaries where a later request may resume: at the end of the prompt, everywhere in decoded tokens
(the next turn of a conversation ends anywhere), where this prompt parted from one that the pool knows, and at every
multiple of an interval for the first prompt that parts from this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_plugin.model.kinds import Kind


@dataclass(frozen=True, slots=True)
class Retention:
    """One request's.

    Args:
        prompt_tokens: length of the prompt.
        alignment: of boundaries, in tokens.
        interval: tokens between boundaries that are kept whatever the prompt; a multiple of `alignment`.
        divergence: boundary where the prompt parted from what the pool knows; 0: none.
    """

    prompt_tokens: int
    alignment: int
    interval: int
    divergence: int = 0

    def blocks(self, kind: Kind, start: int, stop: int) -> list[int]:
        """Those of blocks [start, stop) that are worth storing, in order."""
        boundaries = self._boundaries(start * kind.block_tokens, stop * kind.block_tokens)
        return kind.worth_storing(start, stop, boundaries, self._prompt_end() // kind.block_tokens)

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
