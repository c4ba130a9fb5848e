"""Rules of stores and of requests that end."""

from __future__ import annotations

from collections.abc import Iterator

from tests.conformance.recorder import Call, Note, Recording
from tests.conformance.rules.loads import Loads
from tests.conformance.rules.registry import answered, rule

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
    loads = Loads()
    for event in recording.events:
        if isinstance(event, Call) and event.hook == "get_transfer_results" and event.answer:
            for request_id in event.answer["finished_sending"]:
                load = loads.newest.get(request_id)
                if load is not None and load.aborted:
                    yield f"step {event.step}, rank {event.rank}: {request_id}"
        loads.follow(event)


@rule("request-finished-is-well-formed")
def request_finished_is_well_formed(recording: Recording) -> Iterator[str]:
    for call in answered(recording, *FINISHED):
        answer = call.answer
        right = isinstance(answer, tuple) and len(answer) == 2 and type(answer[0]) is bool
        if not right or not (answer[1] is None or isinstance(answer[1], dict)):
            yield f"step {call.step}: {call.request_id}: {answer}"
        elif call.extras.get("wire"):
            yield f"step {call.step}: {call.request_id}: {call.extras['wire']}"


@rule("pending-push-work-is-said")
def pending_push_work_is_said(recording: Recording) -> Iterator[str]:
    """While the connector holds references, the engine has to go on stepping: reports come with steps."""
    for note in recording.notes("holds"):
        if not note.facts["pending"]:
            yield f"step {note.step}: {note.facts['pins']} references and no pending work"


@rule("an-idle-engine-has-no-pending-push-work")
def an_idle_engine_has_no_pending_push_work(recording: Recording) -> Iterator[str]:
    for note in recording.notes("stuck"):
        if not note.facts["unfinished"] and not note.facts["held"]:
            yield f"step {note.step}: no request is left, and the connector has work"


@rule("every-request-ends")
def every_request_ends(recording: Recording) -> Iterator[str]:
    for note in recording.notes("stuck"):
        if left := note.facts["unfinished"] + note.facts["held"]:
            yield f"step {note.step}: {', '.join(left)}"
