"""Rules of what crosses processes."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

from tests.conformance.recorder import SCHEDULER, WORKER, Note, Recording
from tests.conformance.rules.registry import answered, rule

IDLE_METADATA_SLACK_BYTES = 64


@rule("metadata-travels")
def metadata_travels(recording: Recording) -> Iterator[str]:
    for call in recording.calls("build_connector_meta"):
        if not call.extras.get("is_metadata", True):
            yield f"step {call.step}: {call.answer} is no KVConnectorMetadata"
        elif call.extras.get("pickle"):
            yield f"step {call.step}: {call.extras['pickle']}"


@rule("jobs-are-handed-over-once")
def jobs_are_handed_over_once(recording: Recording) -> Iterator[str]:
    """Building metadata resets it: a step in which nothing happens carries what the very first one did."""
    sizes: list[tuple[int, int]] = []
    since_busy = 0
    for event in recording.events:
        if isinstance(event, Note):
            since_busy = 0 if event.what in ("load", "aborted", "added", "holds") else since_busy
        elif event.hook == "build_connector_meta" and event.error is None:
            output = event.facts["scheduler_output"]
            idle = not output["num_scheduled_tokens"] and not output["finished_req_ids"]
            since_busy = since_busy + 1 if idle else 0
            if since_busy > 1:
                sizes.append((event.step, event.extras["num_bytes"]))
    limit = (sizes[0][1] if sizes else 0) + IDLE_METADATA_SLACK_BYTES
    return (f"step {step}: {size} bytes in an idle step, and {limit} allowed" for step, size in sizes if size > limit)


@rule("scheduler-output-is-left-alone")
def scheduler_output_is_left_alone(recording: Recording) -> Iterator[str]:
    for call in recording.calls("build_connector_meta"):
        if call.extras.get("changed"):
            yield f"step {call.step}: {', '.join(call.extras['changed'])}"


@rule("worker-metadata-travels")
def worker_metadata_travels(recording: Recording) -> Iterator[str]:
    for call in recording.calls("build_connector_worker_meta"):
        if not call.extras.get("is_metadata", True):
            yield f"step {call.step}: {call.answer} is no KVConnectorWorkerMetadata"
        elif call.extras.get("pickle"):
            yield f"step {call.step}: {call.extras['pickle']}"


@rule("worker-metadata-adds-up")
def worker_metadata_adds_up(recording: Recording) -> Iterator[str]:
    for call in recording.calls("build_connector_worker_meta"):
        if call.extras.get("aggregate"):
            yield f"step {call.step}: {call.extras['aggregate']}"


@rule("stats-travel")
def stats_travel(recording: Recording) -> Iterator[str]:
    for call in recording.calls("get_kv_connector_stats"):
        if call.extras.get("wire"):
            yield f"step {call.step}, {call.side}: {call.extras['wire']}"


@rule("events-are-well-formed")
def events_are_well_formed(recording: Recording) -> Iterator[str]:
    for call in answered(recording, "take_events"):
        for event, failure in zip(call.answer, call.extras["wire"], strict=True):
            if failure or not isinstance(event, KVCacheEvent):
                yield f"step {call.step}: {event}: {failure or 'is no KVCacheEvent'}"
            elif isinstance(event, BlockStored) and event.token_ids:
                if len(event.token_ids) != event.block_size * len(event.block_hashes):
                    yield f"step {call.step}: {event}: as many tokens as blocks hold"
            elif isinstance(event, BlockStored | BlockRemoved) and not event.block_hashes:
                yield f"step {call.step}: {event}: no block"


@rule("events-follow-from-each-other")
def events_follow_from_each_other(recording: Recording) -> Iterator[str]:
    """Only a block that was stored is removed."""
    stored: set[object] = set()
    for call in answered(recording, "take_events"):
        for event in call.answer:
            if isinstance(event, BlockStored):
                stored.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                if unknown := set(event.block_hashes) - stored:
                    yield f"step {call.step}: removed and never stored: {sorted(map(str, unknown))}"
                stored.difference_update(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                stored.clear()


@rule("events-are-taken-once")
def events_are_taken_once(recording: Recording) -> Iterator[str]:
    for call in answered(recording, "take_events"):
        if call.extras["again"]:
            yield f"step {call.step}: {len(call.extras['again'])} events again"


@rule("shutdown-is-idempotent")
def shutdown_is_idempotent(recording: Recording) -> Iterator[str]:
    for side in (SCHEDULER, WORKER):
        yield from (f"{side}: {call.error}" for call in recording.calls("shutdown", side=side) if call.error)
