from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvpool.commands.doctor_checks import MAX_COMPARED, MAX_FINDINGS, block_sizes, namespaces, separate
from kvpool.protocol.namespace import MEASUREMENT_MODEL, NamespaceSpec
from kvpool.protocol.wire import encode_spec
from kvpool.report.judgements import Level
from kvpool.v1 import pool_pb2 as pb
from tests.support.values import group_spec, namespace_spec, replaced

BASE = namespace_spec(group_spec(chunk_bytes=1_000, block_tokens=16))


def info(spec: NamespaceSpec = BASE, **fields: Any) -> pb.NamespaceInfo:
    return pb.NamespaceInfo(spec=encode_spec(spec.listed()), fingerprint=spec.fingerprint(), opened_by="host", **fields)


def changed(**fields: Any) -> pb.NamespaceInfo:
    return info(dataclasses.replace(BASE, **fields))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (changed(kv_cache_dtype="fp8"), "because of kv_cache_dtype alone: 'auto' and 'fp8'"),
        (changed(hash_seed="0"), "because of hash_seed alone"),
        (changed(weights_epoch="2"), "because of weights_epoch alone: '' and '2'"),
        (changed(extra=(("k", "v"),)), "because of extra['k'] alone: None and 'v'"),
        # Another --block-size changes the sizes of blocks and chunks, too.
        (
            changed(groups=(group_spec(chunk_bytes=2_000, block_tokens=32),), hash_block_tokens=32),
            "because of groups[0].block_tokens alone: 16 and 32",
        ),
    ],
)  # fmt: skip
def test_one_field_that_separates_engines_is_named(other: pb.NamespaceInfo, says: str) -> None:
    base = info(dataclasses.replace(BASE, kv_cache_dtype="auto") if "kv_cache_dtype" in says else BASE)
    (found,) = separate([base, other])
    assert found.level is Level.WARNING and says in found.text and "host" in found.text
    assert f"--diff {base.fingerprint.hex()[:12]} {other.fingerprint.hex()[:12]}" in found.fix


def test_secrets_are_not_told() -> None:
    (found,) = separate([changed(hash_seed="my seed"), changed(hash_seed="your seed")])
    assert "because of hash_seed alone" in found.text and "alone:" not in found.text


@pytest.mark.parametrize(
    "others",
    [
        [],
        [changed(model="another", kv_cache_dtype="fp8")],
        [changed(tenant="b", weights_epoch="2")],
        [changed(tenant="b")],
        [changed(salt="b")],
        [changed(pipeline_stage=1)],
        [replaced(changed(weights_epoch="2"), superseded=True)],
    ],
    ids=["alone", "another model", "two fields", "a tenant", "a salt", "a stage", "superseded"],
)
def test_namespaces_that_are_meant_to_be_separate_are_no_problem(others: list[pb.NamespaceInfo]) -> None:
    (found,) = separate([info(), *others])
    assert found.level is Level.OK


def test_the_same_weights_by_another_name_are_the_same_model() -> None:
    one, other = (
        info(dataclasses.replace(BASE, model=name, weights_digest="d", kv_cache_dtype=name)) for name in ("a", "b")
    )
    (found,) = separate([one, other])
    assert "because of kv_cache_dtype alone" in found.text


def test_there_is_a_bound_of_findings_and_of_comparisons() -> None:
    assert len(separate([changed(weights_epoch=f"{nth}") for nth in range(500)])) == MAX_FINDINGS
    apart = [changed(model=f"{nth}") for nth in range(MAX_COMPARED + 1)]
    (found,) = separate([*apart, replaced(changed(weights_epoch="old"), superseded=True)])
    assert found.text.startswith(f"{MAX_COMPARED} of {MAX_COMPARED + 2} namespaces compared: ")


def test_measurements_are_compared_with_nothing() -> None:
    measured = [changed(model=MEASUREMENT_MODEL, kv_cache_dtype=name) for name in ("a", "b")]
    assert all(each.level is Level.OK for each in namespaces([changed(hash_seed="0"), *measured], 1 << 40))


def test_blocks_are_compared_with_the_arena() -> None:
    a_token = BASE.groups[0].slot_bytes / 16
    assert [each.level for each in block_sizes([info()], int(100_000 * a_token))] == [Level.OK]
    (found,) = block_sizes([info()], int(160 * a_token))
    assert found.level is Level.WARNING and "holds 160 tokens" in found.text
    (found,) = block_sizes([info()], BASE.groups[0].slot_bytes - 1)
    assert found.level is Level.ERROR and "a block of" in found.text
    assert block_sizes([], 1) == []


def test_hostile_names_are_escaped() -> None:
    model = "[/bold]\x1b[2J\n" * 100
    one, other = (info(dataclasses.replace(BASE, model=model, extra=(("\x1b[2J", text),))) for text in ("a\x1b", "b\n"))
    for found in (*separate([one, other]), *block_sizes([one], 1)):
        assert (found.text + found.fix).isprintable() and len(found.text) < 1_000
