"""Rules of `get_num_new_matched_tokens` and of what follows from its answer."""

from __future__ import annotations

from collections.abc import Iterator

from tests.conformance.recorder import Note, Recording
from tests.conformance.rules.registry import matches, rule


@rule("match-is-well-formed")
def match_is_well_formed(recording: Recording) -> Iterator[str]:
    for call in matches(recording):
        count, is_async = call.answer
        if not (count is None or (type(count) is int and count >= 0)) or type(is_async) is not bool:
            yield f"step {call.step}: {call.request_id}: {call.answer}"


@rule("match-of-nothing-is-not-asynchronous")
def match_of_nothing_is_not_asynchronous(recording: Recording) -> Iterator[str]:
    for call in matches(recording):
        if call.answer == (0, True):
            yield f"step {call.step}: {call.request_id}: (0, True)"


@rule("match-is-idempotent")
def match_is_idempotent(recording: Recording) -> Iterator[str]:
    for call in matches(recording):
        first = call.extras.get("first", call.answer)
        if first[0] is not None and first != call.answer:
            yield f"step {call.step}: {call.request_id}: {first}, asked again {call.answer}"


@rule("match-takes-no-reference")
def match_takes_no_reference(recording: Recording) -> Iterator[str]:
    for call in recording.calls("get_num_new_matched_tokens"):
        if call.pinned:
            yield f"step {call.step}: {call.request_id}: references {dict(call.pinned)}"


@rule("match-stays-within-the-request")
def match_stays_within_the_request(recording: Recording) -> Iterator[str]:
    for call in matches(recording):
        count, is_async = call.answer
        local, tokens = call.facts["num_computed_tokens"], call.facts["request"].num_tokens
        # A load of all tokens is cut by one later, a synchronous one has no later.
        limit = tokens if is_async else tokens - 1
        if count and local + count > limit:
            yield f"step {call.step}: {call.request_id}: {count} tokens at {local} of {tokens}"


@rule("no-match-after-a-failed-load")
def no_match_after_a_failed_load(recording: Recording) -> Iterator[str]:
    failed: set[str] = set()
    for event in recording.events:
        if isinstance(event, Note):
            if event.what == "added":
                failed.discard(event.facts["request_id"])
        elif event.hook == "get_transfer_results" and event.answer:
            failed |= event.answer["failed_recving"]
        elif event.hook == "get_num_new_matched_tokens" and event.request_id in failed and (event.answer or [0])[0]:
            yield f"step {event.step}: {event.request_id}: {event.answer[0]} tokens again"


@rule("a-reset-forgets")
def a_reset_forgets(recording: Recording) -> Iterator[str]:
    """The engine notes when it asks for what was there before a reset that was answered with True."""
    for note in recording.notes("after-reset"):
        if note.facts["hit_tokens"]:
            yield f"step {note.step}: {note.facts['hit_tokens']} tokens of before"


@rule("a-warm-run-hits")
def a_warm_run_hits(recording: Recording) -> Iterator[str]:
    for note in recording.notes("warm"):
        if not note.facts["hit_tokens"]:
            yield f"step {note.step}: no token was loaded"


@rule("hit-sources-add-up")
def hit_sources_add_up(recording: Recording) -> Iterator[str]:
    for call in recording.calls("get_external_cache_hit_sources"):
        if call.error is None and sum(call.answer.values()) != call.facts["num_external_tokens"]:
            yield f"step {call.step}: {call.answer} for {call.facts['num_external_tokens']} tokens"


@rule("loaded-groups-exist")
def loaded_groups_exist(recording: Recording) -> Iterator[str]:
    for call in recording.calls("get_loaded_kv_cache_group_ids"):
        if call.error is None and not set(call.answer) <= set(range(recording.num_groups)):
            yield f"step {call.step}: groups {call.answer} of {recording.num_groups}"
