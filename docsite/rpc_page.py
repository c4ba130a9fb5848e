"""The site's page of RPCs: every RPC and message of the proto contract, with its comments.

Descriptors have names, types and numbers; comments are in the source alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvpool.v1 import pool_pb2

SOURCE = Path(__file__).parents[1] / "proto" / "kvpool" / "v1" / "pool.proto"
_BEGIN = re.compile(r"\s*(?P<kind>rpc|message|enum|service|oneof) (?P<name>\w+)")
_FIELD = re.compile(
    r"\s*(?:(?:optional|repeated)\s+)?(?:[\w.]+|map<[^>]+>)?\s*\b(?P<name>\w+) = \d+[^;]*;\s*(?://\s*(?P<behind>.*))?"
)
INTRODUCTION = """# RPCs

Every call of the service `kvpool.v1.Pool` and every message, from
[`pool.proto`](../../proto/kvpool/v1/pool.proto). [The protocol](protocol.md) tells how the calls belong together, and
what the server and its clients check; [write a client](../how-to/write-a-client.md) begins with the simplest ones.
"""


def page() -> str:
    """The whole page."""
    comments = _comments(SOURCE.read_text())
    parts = [INTRODUCTION, "## Calls\n"]
    for service in pool_pb2.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            asked, answered = (_streamed(method, side) for side in ("client", "server"))
            parts.append(
                f"### {method.name}\n\n{comments.get((service.name, method.name), '')}\n\n"
                f"{asked}[`{method.input_type.name}`](#{method.input_type.name.lower()}) → "
                f"{answered}[`{method.output_type.name}`](#{method.output_type.name.lower()})\n"
            )
    parts.append("## Messages\n")
    for message in sorted(pool_pb2.DESCRIPTOR.message_types_by_name.values(), key=lambda each: str(each.name)):
        parts += _message(message, (message.name,), comments)
    for enum in pool_pb2.DESCRIPTOR.enum_types_by_name.values():
        parts += _enum(enum, (enum.name,), comments)
    return "\n".join(parts).rstrip() + "\n"


def _message(message: Any, path: tuple[str, ...], comments: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    if message.GetOptions().map_entry:
        return
    yield f"### {'.'.join(path)}\n"
    if told := comments.get(path):
        yield f"{told}\n"
    if message.fields:
        rows = [
            f"| {field.number} | `{field.name}` | {_type(field)} | {comments.get((*path, field.name), '')} |"
            for field in message.fields
        ]
        yield "| | field | type | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    else:
        yield "No fields.\n"
    for each in message.nested_types:
        yield from _message(each, (*path, each.name), comments)
    for each in message.enum_types:
        yield from _enum(each, (*path, each.name), comments)


def _enum(enum: Any, path: tuple[str, ...], comments: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    yield f"### {'.'.join(path)}\n"
    if told := comments.get(path):
        yield f"{told}\n"
    rows = [f"| {value.number} | `{value.name}` | {comments.get((*path, value.name), '')} |" for value in enum.values]
    yield "| | value | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _streamed(method: Any, side: str) -> str:
    return "stream of " if getattr(method, f"{side}_streaming") else ""


def _type(field: Any) -> str:
    """As in the source: `repeated bytes`, a link to a message, or `map`."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return f"map of {_type(key)} to {_type(value)}"
    of = field.message_type or field.enum_type
    name = f"[`{of.name}`](#{_anchor(of)})" if of is not None else f"`{SCALARS[field.type]}`"
    return f"repeated {name}" if _is_repeated(field) else name


def _is_repeated(field: Any) -> bool:
    is_repeated = getattr(field, "is_repeated", None)
    return bool(is_repeated() if callable(is_repeated) else is_repeated)


def _anchor(of: Any) -> str:
    return str(of.full_name).removeprefix("kvpool.v1.").replace(".", "").lower()


SCALARS = {
    1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 6: "fixed64", 7: "fixed32", 8: "bool", 9: "string",
    12: "bytes", 13: "uint32", 15: "sfixed32", 16: "sfixed64", 17: "sint32", 18: "sint64",
}  # fmt: skip
"""FieldDescriptor.type -> its name in the proto language."""


def _comments(source: str) -> dict[tuple[str, ...], str]:
    """Path of a message, field or call -> the comment above it and behind it."""
    found: dict[tuple[str, ...], str] = {}
    open_names: list[str | None] = []
    above: list[str] = []
    for line in source.splitlines():
        if line.strip().startswith("//"):
            above.append(line.strip().removeprefix("//").strip())
            continue
        path = tuple(name for name in open_names if name is not None)
        code = line.partition("//")[0]
        if begin := _BEGIN.match(line):
            if above:
                found[(*path, begin["name"])] = _prose(above)
            if "{" in code and "}" not in code:
                open_names.append(None if begin["kind"] == "oneof" else begin["name"])
        elif field := _FIELD.match(line):
            behind = [field["behind"]] if field["behind"] else []
            if above or behind:
                found[(*path, field["name"])] = _prose([*above, *behind])
        if code.strip().startswith("}") and open_names:
            open_names.pop()
        above = []
    return found


def _prose(lines: list[str]) -> str:
    """One paragraph, with what is markup in Markdown escaped, but not in code."""
    parts = " ".join(lines).split("`")
    return "`".join(
        re.sub(r"([<*_])", r"\\\1", part) if nth % 2 == 0 else part for nth, part in enumerate(parts)
    ).replace("|", "\\|")
