"""What keeps prompt tokens from being loaded: the label `cause` of `vllm:kvpool_computed_tokens_total`, and of what
engines report to the server.
"""

from __future__ import annotations

import enum


class Cause(enum.Enum):
    """A cause, with its label and a sentence for the docs."""

    LAST_BLOCK = (
        "last_block",
        "The last token, whose logits the request waits for, is always computed, with its block.",
    )
    NEVER_STORED = ("never_stored", "Nobody has stored them, or they left the pool longer ago than it remembers.")
    BEING_WRITTEN = ("being_written", "An engine was storing them.")
    EVICTED = ("evicted", "They had made room for others.")
    REMOVED = ("removed", "They had been removed or cleared by request.")
    CORRUPT = ("corrupt", "Their bytes had changed.")
    PUT_FAILED = ("put_failed", "An engine that was storing them gave up, or was too slow.")
    OTHER_NAMESPACE = (
        "other_namespace",
        "Only another namespace has them: `kvpool namespaces --diff` shows the field.",
    )
    IN_TIER = ("in_tier", "A tier of the pool has them, and did not bring them up in time.")
    WINDOW_OR_STATE = (
        "window_or_state",
        "The pool has them, and not the window or the state to go on from.",
    )
    DECLINED = ("declined", "Loading them would have taken longer than computing them.")
    LOAD_FAILED = ("load_failed", "Their load failed.")
    LOOKUP_FAILED = ("lookup_failed", "Their lookup failed, or its answer was late.")
    WAITING = ("too_many_waiting", "Too many other requests waited for lookups, room or a tier.")
    POOL_AWAY = ("pool_away", "There was no connection to the pool, or its breaker was open.")
    ADAPTER = ("adapter", "They belong to a LoRA adapter that is not shared.")
    NOT_ASKED = ("not_asked", "The request wants its prompt's log-probabilities, or its engine only stores.")
    SHARING_OFF = ("sharing_off", "A reset was under way, or the engine's ranks disagreed.")

    def __init__(self, label: str, gloss: str):
        self.label = label
        self.gloss = gloss
