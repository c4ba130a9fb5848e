"""What to give instead of a value that pydantic has refused, in the words of a command line."""

from __future__ import annotations

from pydantic import ByteSize
from pydantic_core import ErrorDetails


def instead_of(error: ErrorDetails) -> str:
    """What to give, to follow "give"; empty for errors that have a sentence of their own."""
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
            return f"a text that matches {context['pattern']}"
        case "string_too_short":
            return "a text that is not empty"
        case "string_type":
            return "a text"
        case "bool_parsing" | "bool_type":
            return "yes or no"
        case _:
            return ""
