"""Rules of the engine that drives the hooks: without its order nothing that the others find means anything."""

from __future__ import annotations

from collections.abc import Iterator

from tests.conformance.recorder import WORKER, Recording
from tests.conformance.rules.registry import rule

_BOTH_SIDES = {"get_kv_connector_stats", "shutdown", "role", "reset_capture_state", "get_handshake_metadata"}
_OF_WORKER = {
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
    "register_kv_caches",
    "get_finished",
}
_STEP = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


@rule("hooks-on-their-side")
def hooks_on_their_side(recording: Recording) -> Iterator[str]:
    for call in recording.calls():
        if call.hook not in _BOTH_SIDES and (call.hook in _OF_WORKER) != (call.side == WORKER):
            yield f"step {call.step}: {call.hook} on the {call.side}'s side"


@rule("worker-hooks-in-order")
def worker_hooks_in_order(recording: Recording) -> Iterator[str]:
    steps: dict[tuple[int, int], list[str]] = {}
    crashed = {note.step for note in recording.notes("crashed")}
    for call in recording.calls(side=WORKER):
        if call.step and call.hook in _STEP and call.step not in crashed:
            steps.setdefault((call.step, call.rank), []).append(call.hook)
    for (step, rank), hooks in steps.items():
        if tuple(hooks) != _STEP:
            yield f"step {step}, rank {rank}: {', '.join(hooks)}"


@rule("kv-cache-after-constructor")
def kv_cache_after_constructor(recording: Recording) -> Iterator[str]:
    registered: set[int] = set()
    for call in recording.calls(side=WORKER):
        if call.hook == "register_kv_caches":
            if call.rank in registered:
                yield f"rank {call.rank}: registered twice"
            registered.add(call.rank)
        elif call.rank not in registered and call.hook != "shutdown":
            yield f"rank {call.rank}: {call.hook} before register_kv_caches"
