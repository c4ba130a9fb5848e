"""What engines report to the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

REPORTER_BYTES = 16
MAX_ENGINE_CHARS = 64
"""Of an engine's name, its versions, and its transport; longer ones are cut."""
MAX_STAGES = 16
"""Namespaces of one engine that a report names."""
MAX_CAUSES = 64
"""Causes that one report names, those of later releases included."""
MAX_AMOUNT = 1e15
"""Largest sum of seconds, or of GiB hours, that a server tells of: sums stop there."""
MAX_REPORT_BYTES = 64 << 10
"""Larger messages are refused before they are decoded."""


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
    num_devices: int = 1
