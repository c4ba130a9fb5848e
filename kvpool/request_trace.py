"""What became of one request of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_REQUEST_ID_CHARS = 256


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """What became of one request of an engine.

    Args:
        engine, model: of the engine, as the server knows it.
        age_seconds: since the request was given blocks.
        prompt_tokens, local_tokens, loaded_tokens: of the prompt, and of it from the engine's own cache, and the pool.
        computed_tokens: of the prompt, by cause.
        lookup_ms: from the first question to the pool to its last answer, or to the end of a wait for a tier.
        tier_wait_ms: of it, for blocks on their way up from a tier.
        load_ms: from the load's begin until all ranks have reported its end.
        load_failed: what was to be loaded was computed.
    """

    request_id: str
    engine: str = ""
    model: str = ""
    age_seconds: float = 0.0
    prompt_tokens: int = 0
    local_tokens: int = 0
    loaded_tokens: int = 0
    computed_tokens: dict[str, int] = field(default_factory=dict)
    lookup_ms: float = 0.0
    tier_wait_ms: float = 0.0
    load_ms: float = 0.0
    load_failed: bool = False
