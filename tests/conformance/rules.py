"""The contract between vLLM and a connector: one small named checker for each rule, over a recording.

A checker yields what it found wrong, and nothing if the rule was kept. A rule of an object at rest (its constructor,
its types) is in `tests.conformance.statics`.

Source: the docstrings of vllm/distributed/kv_transfer/kv_connector/v1/base.py, and what v1/core/sched/scheduler.py does
with the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

from tests.conformance.recorder import SCHEDULER, WORKER, Call, Note, Recording

Check = Callable[[Recording], Iterable[str]]
Wrong = Callable[[Call], object]
RULES: dict[str, Check] = {}


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    detail: str


def violations(recording: Recording) -> list[Violation]:
    """What a recording shows to be wrong, rule by rule."""
    return [Violation(name, detail) for name, check in RULES.items() for detail in check(recording)]


def rule(name: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        assert name not in RULES, f"two rules are called {name}"
        RULES[name] = check
        return check

    return add


def of_notes(name: str, what: str, describe: str, when: Callable[[Mapping[str, Any]], object] = lambda _: True) -> None:
    """A rule that the engine's memory or its scheduler judges: each note whose facts `when` takes is a violation."""

    @rule(name)
    def check(recording: Recording) -> Iterator[str]:
        notes = (note for note in recording.notes(what) if when(note.facts))
        return (f"step {note.step}: {describe.format(**note.facts)}" for note in notes)


def of_calls(name: str, *hooks: str) -> Callable[[Wrong], Wrong]:
    """A rule of each answered call of some hooks: the function says what is wrong with one, or something false."""

    def add(wrong: Wrong) -> Wrong:
        @rule(name)
        def check(recording: Recording) -> Iterator[str]:
            found = ((call, wrong(call)) for call in answered(recording, *hooks))
            return (f"step {call.step}, {call.side} {call.rank}: {detail}" for call, detail in found if detail)

        return wrong

    return add


def of_extras(name: str, hook: str, extra: str) -> None:
    """A rule that the recorder judges: what it found out beside an answer is wrong."""
    of_calls(name, hook)(lambda call: call.extras.get(extra))


def answered(recording: Recording, *hooks: str) -> Iterator[Call]:
    return (call for call in recording.calls(*hooks) if call.error is None)


# Any hook, and a run as a whole


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


of_notes("engine-survives", "crashed", "{error}")
of_notes("every-request-is-answered", "wrong-answer", "{request_id} has not the answer of the model")


# `get_num_new_matched_tokens`, and what follows from its answer


MATCH = "get_num_new_matched_tokens"


@of_calls("match-is-well-formed", MATCH)
def match_is_well_formed(call: Call) -> object:
    count, is_async = call.answer
    is_right = (count is None or (type(count) is int and count >= 0)) and type(is_async) is bool
    return None if is_right else f"{call.request_id}: {call.answer}"


@of_calls("match-of-nothing-is-not-asynchronous", MATCH)
def match_of_nothing_is_not_asynchronous(call: Call) -> object:
    return call.answer == (0, True) and f"{call.request_id}: (0, True)"


@of_calls("match-is-idempotent", MATCH)
def match_is_idempotent(call: Call) -> object:
    first = call.extras.get("first", call.answer)
    is_other = first[0] is not None and first != call.answer
    return is_other and f"{call.request_id}: {first}, asked again {call.answer}"


@rule("match-takes-no-reference")
def match_takes_no_reference(recording: Recording) -> Iterator[str]:
    for call in recording.calls(MATCH):
        if call.pinned:
            yield f"step {call.step}: {call.request_id}: references {dict(call.pinned)}"


@of_calls("match-stays-within-the-request", MATCH)
def match_stays_within_the_request(call: Call) -> object:
    count, is_async = call.answer
    local, tokens = call.facts["num_computed_tokens"], call.facts["request"].num_tokens
    # A load of all tokens is cut by one later, a synchronous one has no later.
    limit = tokens if is_async else tokens - 1
    return count and local + count > limit and f"{call.request_id}: {count} tokens at {local} of {tokens}"


@rule("no-match-after-a-failed-load")
def no_match_after_a_failed_load(recording: Recording) -> Iterator[str]:
    failed: set[str] = set()
    for event in recording.events:
        if isinstance(event, Note):
            if event.what == "added":
                failed.discard(event.facts["request_id"])
        elif event.hook == "get_transfer_results" and event.answer:
            failed |= event.answer["failed_recving"]
        elif event.hook == MATCH and event.request_id in failed and (event.answer or [0])[0]:
            yield f"step {event.step}: {event.request_id}: {event.answer[0]} tokens again"


# The engine notes when it asks for what was there before a reset that was answered with True.
of_notes("a-reset-forgets", "after-reset", "{hit_tokens} tokens of before", lambda facts: facts["hit_tokens"])
of_notes("a-warm-run-hits", "warm", "no token was loaded", lambda facts: not facts["hit_tokens"])


@of_calls("hit-sources-add-up", "get_external_cache_hit_sources")
def hit_sources_add_up(call: Call) -> object:
    count = call.facts["num_external_tokens"]
    return sum(call.answer.values()) != count and f"{call.answer} for {count} tokens"


@rule("loaded-groups-exist")
def loaded_groups_exist(recording: Recording) -> Iterator[str]:
    for call in recording.calls("get_loaded_kv_cache_group_ids"):
        if call.error is None and not set(call.answer) <= set(range(recording.num_groups)):
            yield f"step {call.step}: groups {call.answer} of {recording.num_groups}"


# Loads, from `update_state_after_alloc` to the last rank's report


@dataclass(slots=True)
class Load:
    """One load, from `update_state_after_alloc` on."""

    request_id: str
    blocks: frozenset[int]
    reported: set[int] = field(default_factory=set)
    aborted: bool = False


@dataclass(slots=True)
class Loads:
    """Replays which loads are under way."""

    all: list[Load] = field(default_factory=list)
    newest: dict[str, Load] = field(default_factory=dict)

    def follow(self, event: Call | Note) -> None:
        if isinstance(event, Note):
            if event.what == "load" and event.facts["is_async"]:
                load = Load(event.facts["request_id"], event.facts["blocks"])
                self.newest[load.request_id] = load
                self.all.append(load)
            elif event.what == "aborted" and event.facts["request_id"] in self.newest:
                self.newest[event.facts["request_id"]].aborted = bool(event.facts["loading"])
        elif event.hook == "get_transfer_results" and event.answer:
            for request_id in event.answer["finished_recving"] & self.newest.keys():
                self.newest[request_id].reported.add(event.rank)


def reports(recording: Recording, kind: str) -> Iterator[tuple[Call, str, Load | None]]:
    """Each id in a field of each transfer's results, and its newest load so far."""
    loads = Loads()
    for event in recording.events:
        if isinstance(event, Call) and event.hook == "get_transfer_results" and event.answer:
            yield from ((event, request_id, loads.newest.get(request_id)) for request_id in event.answer[kind])
        loads.follow(event)


@rule("no-unknown-load-is-reported")
def no_unknown_load_is_reported(recording: Recording) -> Iterator[str]:
    for call, request_id, load in reports(recording, "finished_recving"):
        if load is None:
            yield f"step {call.step}, rank {call.rank}: {request_id}"


@rule("a-load-is-reported-once")
def a_load_is_reported_once(recording: Recording) -> Iterator[str]:
    for call, request_id, load in reports(recording, "finished_recving"):
        if load is not None and call.rank in load.reported:
            yield f"step {call.step}, rank {call.rank}: {request_id} again"


@rule("every-load-is-reported")
def every_load_is_reported(recording: Recording) -> Iterator[str]:
    loads = Loads()
    for event in recording.events:
        loads.follow(event)
        if isinstance(event, Note) and event.what in ("drained", "stuck"):
            for load in loads.all:
                if missing := set(range(recording.world_size)) - load.reported:
                    yield f"step {event.step}: {load.request_id}: not by ranks {sorted(missing)}"


@of_calls("a-failed-load-is-a-finished-one", "get_transfer_results")
def a_failed_load_is_a_finished_one(call: Call) -> object:
    return sorted(call.answer["failed_recving"] - call.answer["finished_recving"])


@rule("load-errors-are-of-loads")
def load_errors_are_of_loads(recording: Recording) -> Iterator[str]:
    """Block ids that failed belong to a load under way, or to one that is reported in the same step."""
    blocks: dict[int, set[int]] = {}
    for event in recording.events:
        if isinstance(event, Note) and event.what == "load":
            for rank in range(recording.world_size):
                blocks.setdefault(rank, set()).update(event.facts["blocks"])
        elif isinstance(event, Call) and event.hook == "get_block_ids_with_load_errors" and event.answer:
            if recording.num_groups > 1:
                yield f"step {event.step}: block ids mean nothing with {recording.num_groups} groups"
            elif foreign := set(event.answer) - blocks.get(event.rank, set()):
                yield f"step {event.step}, rank {event.rank}: blocks {sorted(foreign)} are of no load"


# Stores, and requests that end

FINISHED = ("request_finished", "request_finished_all_groups")


@rule("a-send-is-promised-before")
def a_send_is_promised_before(recording: Recording) -> Iterator[str]:
    """`finished_sending` names requests whose end was answered with True, once a rank."""
    promised: dict[str, set[int]] = {}
    for call in recording.calls(*FINISHED, "get_transfer_results"):
        if call.error is not None:
            continue
        if call.hook in FINISHED:
            if call.answer[0]:
                promised[call.request_id] = set(range(recording.world_size))
            continue
        for request_id in call.answer["finished_sending"]:
            if call.rank not in promised.get(request_id, ()):
                yield f"step {call.step}, rank {call.rank}: {request_id}"
            promised.get(request_id, set()).discard(call.rank)


@rule("every-promise-is-kept")
def every_promise_is_kept(recording: Recording) -> Iterator[str]:
    promised: dict[str, set[int]] = {}
    for event in recording.events:
        if isinstance(event, Note):
            if event.what in ("drained", "stuck"):
                for request_id, ranks in promised.items():
                    if ranks:
                        yield f"step {event.step}: {request_id}: not by ranks {sorted(ranks)}"
        elif event.hook in FINISHED and event.answer and event.answer[0]:
            promised[event.request_id] = set(range(recording.world_size))
        elif event.hook == "get_transfer_results" and event.answer:
            for request_id in event.answer["finished_sending"] & promised.keys():
                promised[request_id].discard(event.rank)


@rule("an-aborted-load-is-not-sent")
def an_aborted_load_is_not_sent(recording: Recording) -> Iterator[str]:
    """Each of the two reports frees the blocks."""
    for call, request_id, load in reports(recording, "finished_sending"):
        if load is not None and load.aborted:
            yield f"step {call.step}, rank {call.rank}: {request_id}"


@of_calls("request-finished-is-well-formed", *FINISHED)
def request_finished_is_well_formed(call: Call) -> object:
    answer = call.answer
    right = isinstance(answer, tuple) and len(answer) == 2 and type(answer[0]) is bool
    if not right or not (answer[1] is None or isinstance(answer[1], dict)):
        return f"{call.request_id}: {answer}"
    return call.extras.get("wire")


# While the connector holds references, the engine has to go on stepping: reports come with steps.
of_notes(
    "pending-push-work-is-said", "holds", "{pins} references and no pending work", lambda facts: not facts["pending"]
)
of_notes(
    "an-idle-engine-has-no-pending-push-work",
    "stuck",
    "no request is left, and the connector has work",
    lambda facts: not facts["unfinished"] and not facts["held"],
)
of_notes(
    "every-request-ends",
    "stuck",
    "{unfinished} have not ended, {held} are held",
    lambda facts: facts["unfinished"] or facts["held"],
)


# KV blocks: which side writes, reads and holds them

of_notes("only-loads-write", "foreign-write", "block {block} of rank {rank} has changed, seen at {hook}")
of_notes("loads-are-whole-when-reported", "read-unwritten", "{request_id} read a block that its load left out")
of_notes("stores-read-no-reused-block", "read-reused", "{request_id} loaded what a later owner's block held")
of_notes("loads-bring-the-right-bytes", "read-wrong", "{request_id} read KV that is not of its prefix")
of_notes("references-are-ones-own", "foreign-reference", "{hook} gave back a reference on block {block} of others")


@rule("the-null-block-is-left-alone")
def the_null_block_is_left_alone(recording: Recording) -> Iterator[str]:
    for note in recording.notes("foreign-write"):
        if note.facts["block"] == 0:
            yield f"step {note.step}: written to, seen at {note.facts['hook']}"
    for call in recording.calls():
        if 0 in call.pinned:
            yield f"step {call.step}: {call.hook}: references {call.pinned[0]:+}"


@rule("references-change-on-the-scheduler-side")
def references_change_on_the_scheduler_side(recording: Recording) -> Iterator[str]:
    for call in recording.calls(side=WORKER):
        if call.pinned:
            yield f"step {call.step}: {call.hook}: references {dict(call.pinned)}"


of_notes(
    "a-drained-engine-has-no-block-in-use",
    "drained",
    "{used} blocks, references {pins}",
    lambda facts: facts["used"] or facts["pins"],
)
of_notes(
    "a-drained-engine-can-reset-its-cache",
    "drained",
    "reset_prefix_cache() failed",
    lambda facts: not facts["cleared"],
)


# What crosses processes

IDLE_METADATA_SLACK_BYTES = 64


@of_calls("metadata-travels", "build_connector_meta")
@of_calls("worker-metadata-travels", "build_connector_worker_meta")
def metadata_travels(call: Call) -> object:
    if not call.extras.get("is_metadata", True):
        return f"{call.answer} is no metadata of a connector"
    return call.extras.get("pickle")


of_extras("worker-metadata-adds-up", "build_connector_worker_meta", "aggregate")
of_extras("stats-travel", "get_kv_connector_stats", "wire")
of_extras("scheduler-output-is-left-alone", "build_connector_meta", "changed")
of_extras("events-are-taken-once", "take_events", "again")


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


@rule("shutdown-is-idempotent")
def shutdown_is_idempotent(recording: Recording) -> Iterator[str]:
    for side in (SCHEDULER, WORKER):
        yield from (f"{side}: {call.error}" for call in recording.calls("shutdown", side=side) if call.error)


# The engine that drives the hooks: without its order nothing that the other rules find means anything

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
