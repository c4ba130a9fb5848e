"""The kinds of tiers, and the tiers of a server from its `--tier` settings: `file:/mnt/kv,size=200GiB`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ByteSize, ValidationError
from pydantic_core import ErrorDetails

from kvpool.protocol.errors import ConfigError
from kvpool.protocol.text import without_passwords
from kvpool_server.tiers.file.tier import FileOptions
from kvpool_server.tiers.mooncake.tier import MooncakeOptions
from kvpool_server.tiers.peers.options import PeersOptions
from kvpool_server.tiers.tier import TierOptions

KINDS: dict[str, type[TierOptions]] = {"file": FileOptions, "mooncake": MooncakeOptions, "peers": PeersOptions}


def parse(text: str) -> TierOptions:
    """The options of one `--tier`. Raises ConfigError with the tier, the option, its value and the fix.

    What stands before the @ of a URL, which may be a password, does not appear there.
    """
    try:
        return _parse(text)
    except ConfigError as error:
        raise ConfigError(without_passwords(str(error))) from None


def _parse(text: str) -> TierOptions:
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        examples = _either([each.EXAMPLE for each in KINDS.values()])
        raise ConfigError(f"tier {text!r}: unknown kind {kind!r}; choose {_either(list(KINDS))}, as in {examples}")
    options = KINDS[kind]
    values: dict[str, Any] = {}
    parts = rest.split(",") if rest else []
    if options.PLACE and parts:
        values[options.PLACE] = parts.pop(0)
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals:
            shown = part.rpartition("@")[2]  # Of a URL's password with a comma nothing is shown.
            raise ConfigError(f"tier {text!r}: {shown!r} is no option; write NAME=VALUE, as in {options.EXAMPLE}")
        if name in values:
            raise ConfigError(f"tier {text!r}: option {name!r} is given twice; give it once")
        values[name] = value
    try:
        return options(**values)
    except ValidationError as error:
        # An unknown option may be a missing one with a spelling mistake.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        raise ConfigError(f"tier {text!r}: {_problem(options, first)}") from None


def _problem(options: type[TierOptions], error: ErrorDetails) -> str:
    name = ".".join(map(str, error["loc"]))
    match error["type"]:
        case "missing" if name == options.PLACE:
            return f"{name} is missing; write {options.EXAMPLE}"
        case "missing":
            return f"option {name!r} is missing; add {name}= ({options.model_fields[name].description})"
        case "extra_forbidden":
            known = [field for field in options.model_fields if field != options.PLACE]
            return f"unknown option {name!r}; choose {_either(known)}"
        case _:
            fix = instead_of(error, options) or error["msg"].removeprefix("Value error, ")
            return f"{name}={error['input']} is not possible; give {fix}"


def instead_of(error: ErrorDetails, model: type[BaseModel]) -> str:
    """What to give instead of a value that pydantic has refused; empty for errors that have a sentence of their own.

    A field of `model` with a pattern has a title, which says what matches.
    """
    context = error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal" if context["ge"] >= 1 << 20:
            return f"at least {ByteSize(context['ge']).human_readable()}"
        case "greater_than_equal":
            return f"at least {context['ge']}"
        case "less_than_equal":
            return f"at most {context['le']}"
        case "byte_size":
            return "a number of bytes, as 200GiB"
        case "literal_error":
            return str(context["expected"]).replace("'", "")
        case "int_parsing" | "int_type" | "int_from_float" | "int_parsing_size":
            return "a whole number"
        case "string_pattern_mismatch":
            return model.model_fields[str(error["loc"][0])].title or ""
        case "string_too_short":
            return "a text that is not empty"
        case "string_type":
            return "a text"
        case "bool_parsing" | "bool_type":
            return "yes or no"
        case _:
            return ""


def _either(names: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
