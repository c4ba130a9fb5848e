"""Rules of KV blocks: who writes them, who reads them, who holds them."""

from __future__ import annotations

from collections.abc import Iterator

from tests.conformance.recorder import WORKER, Recording
from tests.conformance.rules.registry import from_notes, rule

from_notes("only-loads-write", "foreign-write", "block {block} of rank {rank} has changed, seen at {hook}")
from_notes("loads-are-whole-when-reported", "read-unwritten", "{request_id} read a block that its load left out")
from_notes("stores-read-no-reused-block", "read-reused", "{request_id} loaded what a later owner's block held")
from_notes("loads-bring-the-right-bytes", "read-wrong", "{request_id} read KV that is not of its prefix")
from_notes("references-are-ones-own", "foreign-reference", "{hook} gave back a reference on block {block} of others")


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


@rule("a-drained-engine-has-no-block-in-use")
def a_drained_engine_has_no_block_in_use(recording: Recording) -> Iterator[str]:
    for note in recording.notes("drained"):
        if note.facts["used"] or note.facts["pins"]:
            yield f"step {note.step}: {note.facts['used']} blocks, references {note.facts['pins']}"


@rule("a-drained-engine-can-reset-its-cache")
def a_drained_engine_can_reset_its_cache(recording: Recording) -> Iterator[str]:
    for note in recording.notes("drained"):
        if not note.facts["cleared"]:
            yield f"step {note.step}: reset_prefix_cache() failed"
