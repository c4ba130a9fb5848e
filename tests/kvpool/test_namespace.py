import dataclasses
from typing import Any

import pytest

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.namespace import FORMAT_VERSION, MAX_GROUPS, MAX_SHARDS, GroupSpec, NamespaceSpec, differences
from tests.support.values import group_spec, namespace_spec

GOLDEN_FINGERPRINT = "e618a075b036aa7bde791c5f6cda341fa5b20c319c2438832695de857d0115bf"
SPEC = namespace_spec(group_spec(), group_spec(kind="mamba", chunk_bytes=64), extra=(("rope", "yarn"),), salt="s")
A, B = ("a", "1"), ("b", "2")
SPEC_FIELDS = [field.name for field in dataclasses.fields(NamespaceSpec) if field.name not in ("groups", "extra")]
GROUP_FIELDS = [field.name for field in dataclasses.fields(GroupSpec)]


def _another(value: Any) -> Any:
    match value:
        case str():
            return value + "x"
        case int():
            return value + 1
        case tuple():
            return (*value, "another")
    raise AssertionError(f"no other value for {value!r}")


def _with_group(idx: int, **changes: Any) -> NamespaceSpec:
    groups = list(SPEC.groups)
    groups[idx] = dataclasses.replace(groups[idx], **changes)
    return dataclasses.replace(SPEC, groups=tuple(groups))


@pytest.mark.parametrize("name", SPEC_FIELDS)
def test_every_field_is_part_of_the_identity_and_is_named_when_it_differs(name: str) -> None:
    ours = getattr(SPEC, name)
    changed = dataclasses.replace(SPEC, **{name: _another(ours)})
    assert changed.fingerprint() != SPEC.fingerprint()
    assert [(d.field, d.ours, d.theirs) for d in differences(SPEC, changed)] == [(name, ours, _another(ours))]


@pytest.mark.parametrize("idx", [0, 1])
@pytest.mark.parametrize("name", GROUP_FIELDS)
def test_every_field_of_a_group_is_part_of_the_identity(name: str, idx: int) -> None:
    ours = getattr(SPEC.groups[idx], name)
    changed = _with_group(idx, **{name: _another(ours)})
    assert changed.fingerprint() != SPEC.fingerprint()
    found = differences(SPEC, changed)
    assert [d.field for d in found] == [f"groups[{idx}].{name}"]
    assert str(found[0]) == f"groups[{idx}].{name}: {ours!r} here, {_another(ours)!r} there"


def test_groups_and_extra_keys_are_part_of_the_identity_and_the_order_of_extra_is_not() -> None:
    swapped = dataclasses.replace(SPEC, groups=SPEC.groups[::-1])
    fewer = dataclasses.replace(SPEC, groups=SPEC.groups[:1])
    changed = dataclasses.replace(SPEC, extra=(("rope", "linear"), ("eagle", "2")))
    assert len({each.fingerprint() for each in (SPEC, swapped, fewer, changed)}) == 4
    assert [d.field for d in differences(SPEC, fewer)] == ["groups"]
    found = [(d.field, d.ours, d.theirs) for d in differences(SPEC, changed)]
    assert found == [("extra['eagle']", None, "2"), ("extra['rope']", "yarn", "linear")]
    forth, back = (namespace_spec(extra=extra, salt="s") for extra in ((A, B), (B, A)))
    assert forth == back and forth.fingerprint() == back.fingerprint() and differences(forth, back) == []


def test_a_fingerprint_is_a_hash_that_does_not_depend_on_the_process() -> None:
    spec = NamespaceSpec(model="m", groups=(GroupSpec("full_attention", 16, 8, 64, 64, 1, 256),))
    assert spec.fingerprint().hex() == GOLDEN_FINGERPRINT


def test_every_text_counts_with_its_bytes_and_in_a_list_even_if_it_is_empty() -> None:
    for name in (name for name in SPEC_FIELDS if isinstance(getattr(SPEC, name), str)):
        longer = dataclasses.replace(SPEC, **{name: getattr(SPEC, name) + "\u20ac"})
        assert longer.nbytes == SPEC.nbytes + len("\u20ac".encode())
    one = _with_group(0, layer_names=("",)).nbytes - _with_group(0, layer_names=()).nbytes
    assert one == _with_group(0, layer_formats=("",)).nbytes - _with_group(0, layer_formats=()).nbytes > 0
    assert dataclasses.replace(SPEC, extra=(*SPEC.extra, ("a", ""))).nbytes == SPEC.nbytes + 2 * one + 1
    assert _with_group(0, kind="mamba2").nbytes == _with_group(0, kind="mamba").nbytes + 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (namespace_spec(model=""), r"model is empty"),
        (namespace_spec(format_version=FORMAT_VERSION + 1), r"format_version 2 is not 1"),
        (dataclasses.replace(SPEC, groups=()), rf"0 groups, not 1 to {MAX_GROUPS}"),
        (namespace_spec(*[group_spec()] * (MAX_GROUPS + 1)), rf"65 groups, not 1 to {MAX_GROUPS}"),
        (namespace_spec(group_spec(), group_spec(num_shards=0)), r"groups\[1\]\.num_shards 0"),
        (namespace_spec(group_spec(kind="mamba\x1b[2J")), r"groups\[0\]\.kind 'mamba\\x1b\[2J' is no name"),
        (namespace_spec(group_spec(kind="")), r"groups\[0\]\.kind '' is no name"),
        (namespace_spec(group_spec(kind="a" * 65)), r"groups\[0\]\.kind 'a+' is no name"),
        (namespace_spec(group_spec(num_shards=MAX_SHARDS + 1)), r"groups\[0\]\.num_shards 65"),
        (namespace_spec(group_spec(chunk_bytes=0)), r"groups\[0\]\.chunk_bytes 0"),
        (namespace_spec(group_spec(block_tokens=0)), r"groups\[0\]\.block_tokens 0"),
    ],
)
def test_an_unsound_spec_is_refused_by_the_name_of_its_field(spec: NamespaceSpec, message: str) -> None:
    namespace_spec(*[group_spec(num_shards=MAX_SHARDS)] * MAX_GROUPS).check()
    with pytest.raises(InvalidRequestError, match=message):
        spec.check()
