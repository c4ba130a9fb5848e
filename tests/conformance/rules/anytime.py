"""Rules of any hook, and of a run as a whole."""

from __future__ import annotations

from collections.abc import Iterator

from tests.conformance.recorder import Recording
from tests.conformance.rules.registry import from_notes, rule


@rule("no-hook-raises")
def no_hook_raises(recording: Recording) -> Iterator[str]:
    return (
        f"step {call.step}: {call.hook}: {call.error}"
        for call in recording.calls()
        if call.error and call.hook != "shutdown"
    )


@rule("hooks-do-not-block")
def hooks_do_not_block(recording: Recording) -> Iterator[str]:
    for call in recording.calls():
        if call.seconds > recording.hook_limit_s and call.hook not in ("shutdown", "reset_cache"):
            yield f"step {call.step}: {call.hook} took {call.seconds:.3f} s"


from_notes("engine-survives", "crashed", "{error}")
from_notes("every-request-is-answered", "wrong-answer", "{request_id} has not the answer of the model")
