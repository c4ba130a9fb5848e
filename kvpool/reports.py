"""What engines report to the server, and what the server tells of them: values without meaning of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.request_trace import RequestTrace

REPORTER_BYTES = 16
MAX_ENGINE_CHARS = 64
"""Of an engine's name, its versions, and its transport; longer ones are cut."""
MAX_STAGES = 16
"""Namespaces of one engine that a report names."""
MAX_CAUSES = 64
"""Causes that one report names, those of later releases included."""
MAX_SIZE_CLASS = 40
"""Hits of 2^40 tokens and more are of one size class with smaller ones."""
MAX_SIZE_CLASSES = 2 * (MAX_SIZE_CLASS + 1)
"""Loaded and held out."""
MAX_REQUESTS = 512
"""Of which one report tells."""
MAX_REQUESTS_BYTES = 48 << 10
"""Of requests in one report; an engine takes no further ones then, so that the whole report is small enough."""
MAX_AMOUNT = 1e15
"""Largest sum of seconds, or of GiB hours, that a server tells of: sums stop there."""
MAX_REPORT_BYTES = 64 << 10
"""Larger messages are refused before they are decoded."""


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """Times to the first token of `count` requests whose hits have one size class: their sum, and their squares' sum.

    Args:
        size_class: c: hits of 2^c tokens or more, and less than 2^(c+1).
        held_out: the hits were computed all the same; else loaded.
    """

    size_class: int
    held_out: bool
    count: int = 0
    sum_seconds: float = 0.0
    sum_square_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often the first tokens of one prompt agree.

    Args:
        num_mixed, num_mixed_equal: comparisons of a loaded request with a held-out one, and those with equal tokens.
        num_held_out, num_held_out_equal: comparisons of two held-out requests, and those with equal tokens.
    """

    num_mixed: int = 0
    num_mixed_equal: int = 0
    num_held_out: int = 0
    num_held_out_equal: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            self.num_mixed + other.num_mixed,
            self.num_mixed_equal + other.num_mixed_equal,
            self.num_held_out + other.num_held_out,
            self.num_held_out_equal + other.num_held_out_equal,
        )


NO_AGREEMENT = Agreement()


@dataclass(frozen=True, slots=True)
class EngineReport:
    """How an engine is, and what it has counted since its last acknowledged report: `ReportRequest` in the proto."""

    reporter: bytes
    sequence: int
    engine: str = ""
    version: str = ""
    vllm_version: str = ""
    transport: str = ""
    breaker_open: bool = False
    namespaces: tuple[bytes, ...] = ()
    computed_tokens: Mapping[str, int] = field(default_factory=dict)
    loaded_tokens: int = 0
    load_seconds: float = 0.0
    saved_seconds: float = 0.0
    lost_seconds: float = 0.0
    num_requests: int = 0
    last: bool = False
    first_token_times: tuple[FirstTokenTimes, ...] = ()
    agreement: Agreement = NO_AGREEMENT
    num_devices: int = 1
    requests: tuple[RequestTrace, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine that has reported within the last minute.

    Args:
        age_seconds: since its last report.
        namespaces: fingerprints of its pipeline stages.
        tenant, model: of the first namespace.
    """

    engine: str
    version: str
    vllm_version: str
    transport: str
    breaker_open: bool
    age_seconds: float
    namespaces: tuple[bytes, ...] = ()
    tenant: str = ""
    model: str = ""
