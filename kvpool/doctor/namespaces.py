"""Checks of a pool's namespaces: why two of them share nothing, and whether their blocks fit the arena."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from kvpool.protocol.namespace import MEASUREMENT_MODEL, Difference, differences
from kvpool.protocol.text import escaped, opened_text
from kvpool.protocol.wire import decode_spec
from kvpool.report.finding import Finding, error, ok, warning
from kvpool.report.quotas import size_text
from kvpool.v1 import pool_pb2 as pb

MAX_COMPARED = 64
"""Namespaces that are compared with each other, the last used ones."""
MAX_FINDINGS = 8
MAX_VALUE_CHARS = 60
MIN_TOKENS = 8_192
"""An arena that holds fewer tokens of a model does not even hold one long prompt."""

_MEANT = ("tenant", "salt")
"""Fields that are set to keep namespaces apart."""
_DERIVED = ("chunk_bytes", "layer_formats", "hash_block_tokens")
_OPTIONS = {"block_tokens": "--block-size", "hash_seed": "PYTHONHASHSEED", "kv_cache_dtype": "--kv-cache-dtype"}
"""What sets a field, where its name does not say so."""
_CAUSES = ("block_tokens", "num_shards", "model_dtype", "kv_cache_dtype", "num_kv_heads", "head_size_k", "head_size_v")
"""Fields that others follow from: a difference in one of them brings differences in `_DERIVED`."""


def namespaces(infos: Sequence[pb.NamespaceInfo], arena_bytes: int) -> list[Finding]:
    """All checks of engines' namespaces. Those of measurements have no engine."""
    infos = [info for info in infos if info.spec.model != MEASUREMENT_MODEL]
    return [*separate(infos), *block_sizes(infos, arena_bytes)]


def separate(infos: Sequence[pb.NamespaceInfo]) -> list[Finding]:
    """Names the field if two namespaces of one model differ in one only: the usual reason for zero hits.

    Not the tenant or the salt: who sets one wants to share nothing.
    """
    recent = sorted((info for info in infos if not info.superseded), key=lambda info: info.idle_seconds)
    compared = [(info, decode_spec(info.spec)) for info in recent[:MAX_COMPARED]]
    found = []
    for (one, ours), (other, theirs) in combinations(compared, 2):
        if not _same_model(one.spec, other.spec) or one.spec.pipeline_stage != other.spec.pipeline_stage:
            continue
        causes = _causes(differences(ours, theirs))
        if len(causes) == 1 and causes[0].field not in _MEANT:
            found.append(_separated(one, other, causes[0]))
        if len(found) >= MAX_FINDINGS:
            break
    if found:
        return found
    text = f"{len(compared)} of {len(infos)} namespaces compared: no two of a model differ in one field only"
    return [ok("namespaces", text)]


def _same_model(a: pb.NamespaceSpec, b: pb.NamespaceSpec) -> bool:
    return a.model == b.model or bool(a.weights_digest and a.weights_digest == b.weights_digest)


def _causes(found: Sequence[Difference]) -> list[Difference]:
    """One difference for each setting: groups that differ alike count once, and what follows from others not at all."""
    by_field = {difference.field.rpartition(".")[2]: difference for difference in found}
    if not by_field.keys().isdisjoint(_CAUSES):
        by_field = {field: difference for field, difference in by_field.items() if field not in _DERIVED}
    return list(by_field.values())


def _separated(one: pb.NamespaceInfo, other: pb.NamespaceInfo, difference: Difference) -> Finding:
    a, b = (info.fingerprint.hex()[:12] for info in (one, other))
    both = (escaped(repr(value), MAX_VALUE_CHARS) for value in (difference.ours, difference.theirs))
    values = "" if difference.is_private else f": {' and '.join(both)}"
    ours, theirs = (opened_text(info.opened_by, info.age_seconds) for info in (one, other))
    text = (
        f"namespaces {a} ({ours}) and {b} ({theirs}) of {escaped(one.spec.model, MAX_VALUE_CHARS)} "
        f"share nothing, because of {escaped(difference.field, MAX_VALUE_CHARS)} alone{values}"
    )
    name = difference.field.rpartition(".")[2]
    setting = _OPTIONS.get(name, escaped(name, MAX_VALUE_CHARS))
    fix = f"if they should share, start their engines with the same {setting}"
    return warning("namespaces", text, f"{fix}; `kvpool namespaces --diff {a} {b}`")


def block_sizes(infos: Sequence[pb.NamespaceInfo], arena_bytes: int) -> list[Finding]:
    """Whether the arena holds enough blocks of each model."""
    found = []
    for info in infos:
        groups, name = info.spec.groups, escaped(info.spec.model, MAX_VALUE_CHARS)
        slots = [group.num_shards * group.chunk_bytes for group in groups]
        largest = size_text(max(slots))
        tokens = int(arena_bytes / sum(size / group.block_tokens for size, group in zip(slots, groups, strict=True)))
        if max(slots) > arena_bytes:
            text = f"a block of {name} has {largest}, and the arena {size_text(arena_bytes)}"
            fix = "give the server more --memory, or the engines a smaller --block-size"
            found.append(error("block size", text, fix))
        elif tokens < MIN_TOKENS:
            text = f"the arena holds {tokens:,} tokens of {name} at most, with blocks of {largest}"
            found.append(warning("block size", text, "give the server more --memory"))
    if found or not infos:
        return found[:MAX_FINDINGS]
    return [ok("block size", "the arena holds long prompts of every model")]
