"""`kvpool explain`: why a prompt was computed instead of loaded, in tokens: sentences and a table, or JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import typer
from rich.markup import escape
from rich.table import Column, Table

from kvpool.commands import common
from kvpool.commands.prompts import NamedPrompt, PromptOptions, about_a_prompt
from kvpool.protocol.messages import fields_of
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.text import duration_text
from kvpool.protocol.types import MAX_RANGES
from kvpool.report.output import console, say
from kvpool.v1 import pool_pb2 as pb

MAX_SENTENCES = 12
"""About ranges; the table has all of them."""

_WHY = {
    pb.MISS_CAUSE_NEVER_STORED: "never stored",
    pb.MISS_CAUSE_BEING_WRITTEN: "being written now",
    pb.MISS_CAUSE_EVICTED: "evicted",
    pb.MISS_CAUSE_REMOVED: "removed or cleared",
    pb.MISS_CAUSE_CORRUPT: "dropped because their bytes had changed",
    pb.MISS_CAUSE_PUT_FAILED: "not stored completely, because the writer gave up or was too slow",
    pb.MISS_CAUSE_OTHER_NAMESPACE: "in another namespace",
}
_UNKNOWN = (pb.BLOCK_STATE_MISSING, pb.MISS_CAUSE_NEVER_STORED)
_PASSED_ON = ("newest_left_seconds", "oldest_left_seconds", "unused_seconds", "evicted_for")
"""Fields of a `BlockRange` that JSON has as they are."""

TokenRange = tuple[int, int, pb.BlockRange]
"""Tokens [start, stop) of a prompt in one group, of which the same is known."""


@about_a_prompt
def explain(options: PromptOptions) -> None:
    """Say why a prompt is computed instead of loaded: which of its blocks are stored, and when and why others left.

    Tokens do not give the block names of requests with a LoRA adapter, images or prompt embeddings.
    """
    with common.client_of(options.endpoint) as client:
        named = NamedPrompt.read(client, options)
        found = client.admin.explain(named.info.fingerprint, named.runs, timeout_ms=common.SLOW_TIMEOUT_MS)
    report = PromptReport(named.spec, named.num_tokens, found)
    if options.as_json:
        common.print_json(report.as_json())
        return
    for sentence in report.sentences():
        say(sentence)
    table = Table(*(Column(name, overflow="fold") for name in ("tokens", "group", "where", "why", "when")))
    for row in report.rows():
        table.add_row(*map(escape, row))
    if table.row_count:
        typer.echo("")
        console().print(table)


class PromptReport:
    """What an explanation says of a prompt.

    Args:
        found: one run a group, in the order of the groups, of whole blocks from the prompt's start on.
    """

    def __init__(self, spec: NamespaceSpec, num_tokens: int, found: pb.ExplainResponse):
        self._spec = spec
        self._found = found
        self.num_tokens = num_tokens
        self.alignment = math.lcm(*(group.block_tokens for group in spec.groups))
        self.limit = max(0, (num_tokens - 1) // self.alignment * self.alignment)
        pairs = [(spec.groups[run.group_idx], run) for run in found.runs]
        # Of groups that need every block from the start on; of all groups if there is none such.
        pairs = [(group, run) for group, run in pairs if group.needs_prefix] or pairs
        ends = [(_leading(run) * group.block_tokens, run) for group, run in pairs]
        self.stored, self._shortest = min(ends, key=lambda pair: pair[0])
        """Tokens from the start on whose blocks are stored in each of these groups, and the run that ends first."""
        self.loadable = self._loadable()

    def _loadable(self) -> int:
        """Tokens that an engine would load: up to the last boundary at which each group has what it needs."""
        boundaries = np.arange(self.limit, 0, -self.alignment)
        usable = np.ones(len(boundaries), np.bool_)
        for run in self._found.runs:
            group = self._spec.groups[run.group_idx]
            stops = boundaries // group.block_tokens
            # Of chunked attention, whose chunks a spec does not tell, the last block at least.
            starts = np.maximum(stops - (stops if group.needs_prefix else group.hit_blocks or 1), 0)
            is_there = np.zeros(int(stops.max(initial=0)) + 1, np.int64)
            for part in run.ranges:
                if part.state != pb.BLOCK_STATE_MISSING:
                    is_there[part.first : part.first + part.count] = 1
            num_there = np.concatenate(([0], np.cumsum(is_there)))
            usable &= num_there[stops] - num_there[starts] == stops - starts
        return int(boundaries[usable.argmax()]) if usable.any() else 0

    def ranges(self, run: pb.RunExplanation) -> list[TokenRange]:
        """The ranges of a run in tokens."""
        size = self._spec.groups[run.group_idx].block_tokens
        return [(part.first * size, (part.first + part.count) * size, part) for part in run.ranges]

    def sentences(self) -> list[str]:
        """What is known, most important first."""
        return [
            self._summary(),
            *self._about_tiers(),
            *self._about_names(),
            *itertools.islice(self._about_missing(), MAX_SENTENCES),
            *self._about_rules(),
            *self._about_others(),
            *self._about_memory(),
        ]

    def _summary(self) -> str:
        stored, total = self.stored, self.num_tokens
        share = f" ({stored / total:.0%})" if total else ""
        loaded = f"An engine would load {self.loadable:,} and compute {total - self.loadable:,}."
        return f"{stored:,} of {total:,} tokens are stored{share}. {loaded}"

    def _about_tiers(self) -> Iterator[str]:
        if self._found.tiers_away:
            names = ", ".join(self._found.tiers_away)
            yield f"{names} did not answer for all blocks: missing ones may be there."
        for server, why in sorted(self._found.servers_away.items()):
            yield f"{server} gave no answer about these blocks: {why}."

    def _about_names(self) -> Iterator[str]:
        states = {(part.state, part.cause) for run in self._found.runs for part in run.ranges}
        if states <= {_UNKNOWN} and not self._found.elsewhere and not self._found.tiers_away:
            yield (
                "The server knows no block of this prompt. If an engine has stored it, its blocks have other names: "
                "check the tokenizer, hash seed, cache salt and LoRA adapter."
            )

    def _about_missing(self) -> Iterator[str]:
        at, run = self.stored, self._shortest
        for start, stop, blocks in self.ranges(run):
            which = f"Tokens {start:,} to {stop:,}"
            if blocks.state == pb.BLOCK_STATE_MISSING:
                tense = "are" if blocks.cause == pb.MISS_CAUSE_BEING_WRITTEN else "were"
                times, room = _times(blocks), _room(blocks)
                yield f"{which} {tense} {_WHY[blocks.cause]}{times}{',' if room and ',' in times else ''}{room}."
            elif blocks.state == pb.BLOCK_STATE_IN_TIER:
                holder = f", held by {blocks.server}" if blocks.server else ""
                yield (
                    f"{which} are only in tier {blocks.tier}{holder}: a request waits until the server has read "
                    "them from there, or computes them."
                )
            elif start > at:
                yield f"{which} are stored, but no request can use them without the tokens before them."
        if run.other_children:
            is_one = run.other_children == 1
            others = "Another stored prompt has" if is_one else f"{run.other_children:,} other stored prompts have"
            yield f"{others} the same tokens up to token {at:,}, and other tokens after it."
        size = self._spec.groups[run.group_idx].block_tokens
        if (explained := self.ranges(run)[-1][1]) < self.num_tokens // size * size:
            yield (
                f"The explanation ends at token {explained:,}: it has room for {MAX_RANGES} ranges of tokens, and the "
                "prompt has more."
            )

    def _about_rules(self) -> Iterator[str]:
        if (rest := self.num_tokens - self.limit) == 1:
            yield "The last token is always computed, because the engine needs its logits for the next token."
        else:
            yield (
                f"The last {rest:,} tokens are always computed: the engine needs the last token's logits for the next "
                f"token, and loads only multiples of {self.alignment:,} tokens."
            )
        usable = min(self.stored, self.limit)
        if self.loadable < usable:
            kinds = ", ".join(
                f"{group.kind} of {group.window_tokens:,} tokens" if group.window_tokens else group.kind
                for group in self._spec.groups
                if not group.needs_prefix
            )
            yield (
                f"Tokens {self.loadable:,} to {usable:,} are stored, but cannot be loaded: the model also needs the "
                f"window or state at the end of what is loaded ({kinds}), and that is missing there."
            )

    def _about_others(self) -> Iterator[str]:
        for match in self._found.elsewhere:
            fields = "; ".join(match.differences) or "fields that this caller may not see"
            blocks = f"{match.count:,} block{'' if match.count == 1 else 's'}"
            yield (
                f"Namespace {match.fingerprint.hex()[:12]} has {blocks} of this prompt, from the first "
                f"missing block on. The namespace differs in: {fields}."
            )

    def _about_memory(self) -> Iterator[str]:
        if not self._found.remembered_seconds:
            yield (
                "The server has no record of a block that left the pool, so a block that was never stored has not been "
                "stored since the server's start."
            )
            return
        oldest = duration_text(self._found.remembered_seconds)
        text = f"The server's record of blocks that left the pool begins {oldest} ago"
        if self._found.half_remembered_seconds < self._found.remembered_seconds:
            recent = duration_text(self._found.half_remembered_seconds)
            text += f", and has at least half of the blocks that left in the last {recent}"
        yield f"{text}. A block that left without a record is reported as never stored."

    def rows(self) -> list[list[str]]:
        """Tokens, group, where, why, when."""
        return [
            [f"{start:,} to {stop:,}", self._spec.groups[run.group_idx].kind, *_cells(blocks)]
            for run in self._found.runs
            for start, stop, blocks in self.ranges(run)
        ]

    def as_json(self) -> dict[str, Any]:
        found = self._found
        return {
            "num_tokens": self.num_tokens,
            "stored_tokens": self.stored,
            "loadable_tokens": self.loadable,
            "alignment_tokens": self.alignment,
            "groups": [
                {
                    "group_idx": run.group_idx,
                    "kind": self._spec.groups[run.group_idx].kind,
                    "other_children": run.other_children,
                    "ranges": [_json_range(*part) for part in self.ranges(run)],
                }
                for run in found.runs
            ],
            "elsewhere": [
                {"fingerprint": match.fingerprint.hex(), "blocks": match.count, "differences": list(match.differences)}
                for match in found.elsewhere
            ],
            "remembered_seconds": found.remembered_seconds,
            "half_remembered_seconds": found.half_remembered_seconds,
            "tiers_away": list(found.tiers_away),
            "servers_away": dict(found.servers_away),
            "sentences": self.sentences(),
        }


def _leading(run: pb.RunExplanation) -> int:
    """Stored blocks before the first that is missing."""
    stored = itertools.takewhile(lambda part: part.state != pb.BLOCK_STATE_MISSING, run.ranges)
    return sum(part.count for part in stored)


def _json_range(start: int, stop: int, blocks: pb.BlockRange) -> dict[str, Any]:
    is_complete, known = blocks.state == pb.BLOCK_STATE_COMPLETE, fields_of(blocks)
    return {
        "start": start,
        "stop": stop,
        "state": pb.BlockState.Name(blocks.state).removeprefix("BLOCK_STATE_").lower(),
        "cause": None if is_complete else pb.MissCause.Name(blocks.cause).removeprefix("MISS_CAUSE_").lower(),
        "tier": blocks.tier or None,
        "server": blocks.server or None,
        **{name: known[name] for name in _PASSED_ON},
    }


def _cells(part: pb.BlockRange) -> tuple[str, str, str]:
    """Where blocks are, why they are not in memory, and when they left or were used."""
    if part.state == pb.BLOCK_STATE_COMPLETE:
        used = f"used {duration_text(part.unused_seconds)} ago" if part.HasField("unused_seconds") else ""
        return "memory", "", used
    is_in_tier = part.state == pb.BLOCK_STATE_IN_TIER
    where = " ".join(filter(None, (part.tier, part.server))) if is_in_tier else "missing"
    if is_in_tier and part.cause == pb.MISS_CAUSE_NEVER_STORED:  # Here; another server's engines have.
        return where, "", ""
    return where, _WHY[part.cause] + _room(part), _times(part).strip()


def _times(part: pb.BlockRange) -> str:
    """When blocks left, and how long after their last use."""
    if not part.HasField("newest_left_seconds") or not part.HasField("oldest_left_seconds"):
        return ""
    shortest, longest = duration_text(part.newest_left_seconds), duration_text(part.oldest_left_seconds)
    text = f" {longest} ago" if shortest == longest else f" {longest} to {shortest} ago"
    if part.HasField("unused_seconds") and part.cause == pb.MISS_CAUSE_EVICTED:
        text += f", {duration_text(part.unused_seconds)} after their last use"
    return text


def _room(part: pb.BlockRange) -> str:
    if not part.HasField("evicted_for"):
        return ""
    whose = part.evicted_for
    if whose.is_hidden:
        return " to make room for another tenant"
    of_model = f"model {whose.model}" if whose.model else "one of its models"
    if not whose.tenant:
        return f" to make room for {of_model}" if whose.model else " to make room for another put"
    return f" to make room for tenant {whose.tenant} ({of_model})"
