"""What the pool knows of the blocks of a prompt. The names of fields are those of the contract."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.protocol.types import BlockState, MissCause


@dataclass(frozen=True, slots=True)
class EvictedFor:
    """Whose put blocks made room for.

    Args:
        is_hidden: another tenant's than the caller's; the names are empty then.
        model: empty if unknown.
    """

    tenant: str = ""
    model: str = ""
    is_hidden: bool = False


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Successive blocks of a run of which the same is known.

    Args:
        first: index in the run.
        cause: why they are not in the arena; None for complete ones.
        tier: the one that has them; empty if none has.
        newest_left_seconds, oldest_left_seconds: since the block that left last, or first, has left the arena; None:
            none is known to have left.
        unused_seconds: of complete blocks, since the last use of the one used longest ago; of others, from the last use
            of the first one until it left. None: unknown.
        evicted_for: None: unknown, or for no single put.
    """

    first: int
    count: int
    state: BlockState
    cause: MissCause | None = None
    tier: str = ""
    newest_left_seconds: float | None = None
    oldest_left_seconds: float | None = None
    unused_seconds: float | None = None
    evicted_for: EvictedFor | None = None

    @property
    def stop(self) -> int:
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class RunExplanation:
    """What is known of one run.

    Args:
        ranges: in order, without a gap; the blocks behind them are not explained.
        other_children: stored blocks of other prompts that follow the block before the first missing one, as far as
            the server knows.
    """

    group_idx: int
    ranges: tuple[BlockRange, ...]
    other_children: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceMatch:
    """Another namespace of the tenant, with the same model and salt, that has blocks of the prompt.

    Args:
        count: blocks that it has, from the first missing one on.
        differences: sentences, one for each field that differs.
    """

    fingerprint: bytes
    count: int
    differences: tuple[str, ...]
