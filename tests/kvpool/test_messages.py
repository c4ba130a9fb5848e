"""Every field of every reply to an operator's call, with every hostile value of its type."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvpool.protocol import messages
from kvpool.protocol.errors import InvalidReplyError
from kvpool.protocol.messages import MAX_ELEMENTS, MAX_NUMBER, MAX_UNIX_S, checked, fields_of
from kvpool.v1 import pool_pb2 as pb
from tests.support.cpu_time import MAX_CPU_S, LongestPart

REPLIES = ("WhoAmI", "Stats", "ListNamespaces", "Value", "ListQuotas", "SetQuotas", "Ledger", "Explain", "Drain")
HOSTILE = "[/bold]\x1b[2J\u202e\n\x9b"

Path = tuple[FieldDescriptor, ...]


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def paths(descriptor: Descriptor, above: Path = ()) -> Iterator[Path]:
    """The ways to all fields of a message and of the messages in it."""
    for field in descriptor.fields:
        yield (*above, field)
        if field.message_type is not None and not _is_map(field):
            yield from paths(field.message_type, (*above, field))


def is_list(field: FieldDescriptor) -> bool:
    return field.is_repeated and field.message_type is None


def having(descriptor: Descriptor, path: Path, value: Any) -> Message:
    """A message in which one field has a value."""
    message: Any = GetMessageClass(descriptor)()
    field, *below = path
    if below:
        assert field.message_type is not None
        inner = having(field.message_type, tuple(below), value)
        value = [inner] if field.is_repeated else inner
    return type(message)(**{field.name: value})  # type: ignore[no-any-return]


def at(message: Any, path: Path) -> Any:
    for field in path[:-1]:
        message = getattr(message, field.name)
        message = message[0] if field.is_repeated else message
    return getattr(message, path[-1].name)


ALL = [
    pytest.param(descriptor, path, id=".".join([name, *(field.name for field in path)]))
    for name in REPLIES
    for descriptor in [pb.DESCRIPTOR.message_types_by_name[f"{name}Response"]]
    for path in paths(descriptor)
]
FIELDS = [each for each in ALL if each.values[1][-1].message_type is None or _is_map(each.values[1][-1])]
LISTS = [each for each in ALL if each.values[1][-1].is_repeated and not messages._is_of_spec(each.values[1][-1])]


def beyond(field: FieldDescriptor) -> list[Any]:
    """Values of a field, or of an element or key of it, that are refused."""
    if field.message_type is not None:
        value = field.message_type.fields_by_name["value"]
        wrong = [{"a": each} for each in beyond(value)]
        return wrong if value.type == FieldDescriptor.TYPE_STRING else [*wrong, {"": 1}, {"[red]": 1}]
    if field.type == FieldDescriptor.TYPE_STRING:
        return ["x" * (messages.MAX_SPEC_CHARS + 1)]
    if field.type == FieldDescriptor.TYPE_BYTES:
        return [b"x", bytes(31), bytes(33)]
    if field.type == FieldDescriptor.TYPE_ENUM:
        return [-1, 99]
    if field.type == FieldDescriptor.TYPE_INT64:
        return [-1, MAX_UNIX_S + 1]
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return [math.nan, math.inf, -math.inf, -0.5, 2 * MAX_NUMBER]
    return []


@pytest.mark.parametrize(("descriptor", "path"), FIELDS)
def test_what_is_out_of_its_bounds_is_refused_by_name(descriptor: Descriptor, path: Path) -> None:
    for value in beyond(path[-1]):
        message = having(descriptor, path, [value] if is_list(path[-1]) else value)
        with pytest.raises(InvalidReplyError, match=rf"'s {descriptor.name}[\w.]*\.{path[-1].name} (is|has) "):
            checked(message)


@pytest.mark.parametrize(("descriptor", "path"), LISTS)
def test_no_list_is_endless(descriptor: Descriptor, path: Path) -> None:
    field, count = path[-1], MAX_ELEMENTS + 1
    many: Any = [_element(field)] * count
    if _is_map(field):
        assert field.message_type is not None
        is_text = field.message_type.fields_by_name["value"].type == FieldDescriptor.TYPE_STRING
        many = {f"a{nth}": "1" if is_text else 1 for nth in range(count)}
    with pytest.raises(InvalidReplyError, match=rf"\.{field.name} has {count} elements"):
        checked(having(descriptor, path, many))


def _element(field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return GetMessageClass(field.message_type)()
    return {FieldDescriptor.TYPE_STRING: "", FieldDescriptor.TYPE_BYTES: bytes(32)}.get(field.type, 0)


@pytest.mark.parametrize(("descriptor", "path"), FIELDS)
def test_text_can_be_printed(descriptor: Descriptor, path: Path) -> None:
    field = path[-1]
    of_text = field.message_type.fields_by_name["value"] if field.message_type is not None else field
    if of_text.type != FieldDescriptor.TYPE_STRING:
        return
    is_map = field.message_type is not None
    message = having(descriptor, path, {HOSTILE: HOSTILE} if is_map else [HOSTILE] if is_list(field) else HOSTILE)
    shown = at(checked(message), path)
    texts = [*shown.keys(), *shown.values()] if is_map else list(shown) if is_list(field) else [shown]
    assert set(texts) == {r"[/bold]\x1b[2J\u202e\n\x9b"}
    assert json.dumps(fields_of(message)).isprintable()


def test_a_ratio_a_port_and_a_drain_have_bounds_of_their_own() -> None:
    for reply in (
        pb.ValueResponse(curves=[pb.ValueCurve(estimates=[pb.ValueEstimate(hit_ratio=1.5)])]),
        pb.StatsResponse(server=pb.ServerStats(http_port=65_536)),
        pb.DrainResponse(remaining_ms=3_600_001),
    ):
        with pytest.raises(InvalidReplyError, match="not within 0 to"):
            checked(reply)


def test_lists_in_lists_have_one_bound_together() -> None:
    tiers = [pb.TierHoldings()] * MAX_ELEMENTS
    reply = pb.ListNamespacesResponse(namespaces=[pb.NamespaceInfo(tiers=tiers)] * 500)
    with (longest := LongestPart()).part(), pytest.raises(InvalidReplyError, match="elements, too many"):
        checked(reply)
    assert longest.seconds < MAX_CPU_S


def test_a_right_reply_stays_as_it_is() -> None:
    usage = pb.UsageStats(tenant="ä", model="m/n", lookup_tokens=(1 << 64) - 1, computed_tokens={"evicted": 4})
    server = pb.ServerStats(version="1", usage=[usage], rpc_seconds_bounds=[0.5], certificate_ends={"server": 1e9})
    reply = pb.StatsResponse(boot_token=7, server=server, engines=[pb.EngineState(namespaces=[bytes(32)])])
    before = reply.SerializeToString(deterministic=True)
    assert checked(reply).SerializeToString(deterministic=True) == before


def test_json_has_all_fields_and_null_for_messages_that_are_not_set() -> None:
    part = pb.BlockRange(first=1, count=2, newest_left_seconds=0.0)
    reply = pb.ExplainResponse(runs=[pb.RunExplanation(ranges=[part])])
    (found,) = fields_of(reply)["runs"][0]["ranges"]
    assert (found["newest_left_seconds"], found["oldest_left_seconds"], found["evicted_for"]) == (0.0, None, None)
    assert fields_of(pb.StatsResponse(counters={"lookups": 3}))["counters"] == {"lookups": 3}
    assert fields_of(pb.NamespaceMatch(fingerprint=b"\1"))["fingerprint"] == "01"
    assert "boot_token" not in fields_of(pb.DrainResponse(boot_token=7))
    assert fields_of(pb.ServerStats(uptime_seconds=math.nan))["uptime_seconds"] is None
