"""What each kind of tier is given: the options of one `--tier`, and what all tiers of a server share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvpool_server.cache.eviction import Policy
from kvpool_server.tiers.open_files import OpenFiles
from kvpool_server.tiers.tier import Tier


@dataclass(frozen=True, slots=True)
class TierContext:
    """The server that a tier works for, and what its tiers share.

    Args:
        listen: host and port of the server.
        policy: makes the eviction policy of a tier that evicts by itself.
        handover_s: how long a server of the same name, which this one replaces, may take to stop.
        open_files: bounds the files that all tiers of the server keep open.
    """

    listen: tuple[str, int]
    policy: Callable[[], Policy]
    handover_s: float = 0.0
    open_files: OpenFiles = field(default_factory=OpenFiles)


class TierOptions(BaseModel):
    """Base of each kind's options. A field is an option of `--tier`; its description is the option's documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    EXAMPLE: ClassVar[str]
    """A minimal `--tier`, for errors and help."""
    PLACE: ClassVar[str] = ""
    """The option that stands first, without its name; empty: none does."""

    write: Literal["through", "back"] = Field(
        "through", description="through writes a block when it is stored; back writes it before its eviction"
    )

    @property
    @abstractmethod
    def tier_name(self) -> str:
        """What operators call the tier."""

    @abstractmethod
    def make(self, context: TierContext) -> Tier:
        """The tier, not opened yet. Raises ConfigError if a package or a device is missing."""
