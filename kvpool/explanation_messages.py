"""Explanations as messages, and answers of a server checked, as `wire.py` and `replies.py` do for all other calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvpool.errors import InvalidReplyError
from kvpool.explanation import (
    MAX_DIFFERENCES,
    MAX_MATCHES,
    MAX_RANGES,
    BlockRange,
    BlockState,
    EvictedFor,
    Explanation,
    NamespaceMatch,
    RunExplanation,
)
from kvpool.holdings import escaped
from kvpool.types import HASH_BYTES, BlockRun, MissCause
from kvpool.v1 import pool_pb2 as pb

MAX_NAME_CHARS = 512
MAX_DIFFERENCE_CHARS = 2_000
MAX_SECONDS = 1e10
MAX_TIERS = 64


def encode_explanation(found: Explanation, boot_token: int) -> pb.ExplainResponse:
    """The answer of a server."""
    return pb.ExplainResponse(
        boot_token=boot_token,
        runs=map(encode_run, found.runs),
        elsewhere=[
            pb.NamespaceMatch(
                fingerprint=match.fingerprint,
                count=match.count,
                differences=[text[:MAX_DIFFERENCE_CHARS] for text in match.differences],
            )
            for match in found.elsewhere
        ],
        remembered_seconds=found.remembered_seconds,
        half_remembered_seconds=found.half_remembered_seconds,
        tiers_away=found.tiers_away,
    )


def encode_run(run: RunExplanation) -> pb.RunExplanation:
    """What is known of one run."""
    return pb.RunExplanation(
        group_idx=run.group_idx, ranges=map(_encode_range, run.ranges), other_children=run.other_children
    )


def _encode_range(part: BlockRange) -> pb.BlockRange:
    whose = part.evicted_for
    return pb.BlockRange(
        first=part.first,
        count=part.count,
        state=cast("pb.BlockState", part.state),
        cause=cast("pb.MissCause", part.cause or 0),
        tier=part.tier,
        newest_left_seconds=part.newest_left_seconds,
        oldest_left_seconds=part.oldest_left_seconds,
        unused_seconds=part.unused_seconds,
        evicted_for=None
        if whose is None
        else pb.EvictedFor(is_hidden=whose.is_hidden, tenant=whose.tenant, model=whose.model),
    )


def explanation(reply: pb.ExplainResponse, runs: Sequence[BlockRun]) -> Explanation:
    """The answer to a question about some runs; its text can be printed.

    Raises InvalidReplyError.
    """
    _check(len(reply.runs) == len(runs), f"{len(reply.runs)} runs, for {len(runs)}")
    _check(len(reply.elsewhere) <= MAX_MATCHES, f"{len(reply.elsewhere)} namespaces")
    _check(len(reply.tiers_away) <= MAX_TIERS, f"{len(reply.tiers_away)} tiers")
    return Explanation(
        tuple(_run(message, run) for message, run in zip(reply.runs, runs, strict=True)),
        tuple(map(_match, reply.elsewhere)),
        _seconds(reply.remembered_seconds),
        _seconds(reply.half_remembered_seconds),
        tuple(escaped(name, MAX_NAME_CHARS) for name in reply.tiers_away),
    )


def _run(message: pb.RunExplanation, run: BlockRun) -> RunExplanation:
    _check(message.group_idx == run.group_idx, f"group {message.group_idx}, for group {run.group_idx}")
    _check(1 <= len(message.ranges) <= MAX_RANGES, f"{len(message.ranges)} ranges")
    at = 0
    for each in message.ranges:
        _check(each.first == at and each.count >= 1, f"a range of {each.count} blocks at {each.first}, not at {at}")
        at += each.count
    _check(at <= len(run), f"{at} blocks, of {len(run)}")
    return RunExplanation(message.group_idx, tuple(map(_range, message.ranges)), message.other_children)


def _range(message: pb.BlockRange) -> BlockRange:
    _check(0 <= message.state <= max(BlockState), f"state {message.state}")
    _check(0 <= message.cause <= max(MissCause), f"cause {message.cause}")
    state, whose = BlockState(message.state), message.evicted_for
    newest, oldest = message.newest_left_seconds, message.oldest_left_seconds
    return BlockRange(
        message.first,
        message.count,
        state,
        None if state is BlockState.COMPLETE else MissCause(message.cause),
        escaped(message.tier, MAX_NAME_CHARS),
        _seconds(newest) if message.HasField("newest_left_seconds") else None,
        _seconds(oldest) if message.HasField("oldest_left_seconds") else None,
        _seconds(message.unused_seconds) if message.HasField("unused_seconds") else None,
        EvictedFor(escaped(whose.tenant, MAX_NAME_CHARS), escaped(whose.model, MAX_NAME_CHARS), whose.is_hidden)
        if message.HasField("evicted_for")
        else None,
    )


def _match(message: pb.NamespaceMatch) -> NamespaceMatch:
    _check(len(message.fingerprint) == HASH_BYTES, f"a fingerprint of {len(message.fingerprint)} bytes")
    _check(len(message.differences) <= MAX_DIFFERENCES, f"{len(message.differences)} fields")
    fields = tuple(escaped(text, MAX_DIFFERENCE_CHARS) for text in message.differences)
    return NamespaceMatch(message.fingerprint, message.count, fields)


def _seconds(value: float) -> float:
    _check(0 <= value <= MAX_SECONDS, f"{value} seconds")
    return value


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise InvalidReplyError(f"the server's explanation has {what}")
