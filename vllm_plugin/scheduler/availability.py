"""Which blocks of one group the pool has, by the answers of all pipeline stages to one lookup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpool.types import RunHits
from vllm_plugin.model.hit_rules import Found
from vllm_plugin.model.kinds import Kind


@dataclass(frozen=True, slots=True)
class Availability:
    """Bitmaps; bit i is the i-th block that was asked for.

    Args:
        first: index of the first block that was asked for.
        length: how many blocks were asked for.
        ready: every stage has the block.
        coming: every stage has the block, or it may be on its way up from a tier.
    """

    first: int
    length: int
    ready: int
    coming: int

    @classmethod
    def of(cls, kind: Kind, first: int, length: int, stages: Iterable[RunHits]) -> Availability:
        """By the answers of all stages.

        An answer says how many blocks are on their way up. For a group that needs its whole prefix they are taken to be
        those right behind the leading ones: with `prefix_only` they are, and others would not lengthen a hit. For any
        other kind one of them may be all that a hit lacks, whichever it is.
        """
        ready = coming = everything = (1 << length) - 1
        for hits in stages:
            here = hits.complete | (1 << hits.num_leading) - 1
            ready &= here
            if kind.needs_prefix:
                coming &= here | (1 << hits.num_leading + hits.num_pending) - 1
            elif not hits.num_pending:
                coming &= here
        return cls(first, length, ready & everything, coming & everything)

    def found(self) -> Found:
        return Found(self.first, self.ready, self.length)

    def promised(self) -> Found:
        """What will be found once all blocks are ready that are on their way."""
        return Found(self.first, self.coming, self.length)

    def missing(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """The names of blocks that are neither ready nor on their way."""
        if not self.coming:
            return names
        if self.coming == (1 << self.length) - 1:
            return ()
        bits = reversed(f"{self.coming:0{self.length}b}")
        return [name for bit, name in zip(bits, names, strict=True) if bit == "0"]
