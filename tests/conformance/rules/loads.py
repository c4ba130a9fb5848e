"""Rules of loads, from `update_state_after_alloc` to the last rank's report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.conformance.recorder import Call, Note, Recording
from tests.conformance.rules.registry import answered, rule


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


@rule("no-unknown-load-is-reported")
def no_unknown_load_is_reported(recording: Recording) -> Iterator[str]:
    loads = Loads()
    for event in recording.events:
        if isinstance(event, Call) and event.hook == "get_transfer_results" and event.answer:
            for request_id in event.answer["finished_recving"] - loads.newest.keys():
                yield f"step {event.step}, rank {event.rank}: {request_id}"
        loads.follow(event)


@rule("a-load-is-reported-once")
def a_load_is_reported_once(recording: Recording) -> Iterator[str]:
    loads = Loads()
    for event in recording.events:
        if isinstance(event, Call) and event.hook == "get_transfer_results" and event.answer:
            for request_id in event.answer["finished_recving"] & loads.newest.keys():
                if event.rank in loads.newest[request_id].reported:
                    yield f"step {event.step}, rank {event.rank}: {request_id} again"
        loads.follow(event)


@rule("every-load-is-reported")
def every_load_is_reported(recording: Recording) -> Iterator[str]:
    loads = Loads()
    for event in recording.events:
        loads.follow(event)
        if isinstance(event, Note) and event.what in ("drained", "stuck"):
            for load in loads.all:
                if missing := set(range(recording.world_size)) - load.reported:
                    yield f"step {event.step}: {load.request_id}: not by ranks {sorted(missing)}"


@rule("a-failed-load-is-a-finished-one")
def a_failed_load_is_a_finished_one(recording: Recording) -> Iterator[str]:
    for call in answered(recording, "get_transfer_results"):
        if lost := call.answer["failed_recving"] - call.answer["finished_recving"]:
            yield f"step {call.step}, rank {call.rank}: {sorted(lost)}"


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
