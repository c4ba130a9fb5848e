"""Texts: those from outside, made safe for logs, terminals and errors; durations, sizes, and quotas (SUBJECT=SIZE)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.types import Quota

_UNITS = {"": 1, "B": 1, **{f"{p}iB": 1 << 10 * n for n, p in enumerate("KMGTP", 1)}}
_UNITS |= {f"{p}B": 1_000**n for n, p in enumerate("KMGTP", 1)}
_BY_LOWER = {unit.lower(): nbytes for unit, nbytes in _UNITS.items()}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def without_passwords(text: str) -> str:
    """A text about settings, without what stands before the @ of a URL."""
    return re.sub(r"(:/+)[^\s'\"]*@", r"\1...@", text)


def printable(text: object) -> str:
    """Text from outside, or a path, made safe for logs and terminals: without control characters and line ends."""
    return "".join(char for char in str(text) if char.isprintable())


def escaped(text: str, most: int) -> str:
    """Text from outside for logs, terminals and errors: at most `most` characters of it, others than printable ones
    as escapes."""
    shown = text if len(text) <= most else f"{text[:most]}..."
    if shown.isprintable():
        return shown
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown)


def duration_text(seconds: float) -> str:
    """A duration in the largest unit that it holds at least twice: "3 min"."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def size_text(nbytes: int) -> str:
    """A number of bytes in its largest unit: 20 GiB, 1.5 TiB."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.3g} {units[0]}" if size < 1000 else f"{size:.0f} {units[0]}"


def opened_text(opened_by: str, age_seconds: float) -> str:
    """When a namespace was opened, and by which host: "opened by HOST, 3 min ago"."""
    whose = f"opened by {opened_by}" if opened_by else "found in a tier, or opened by an unknown host"
    return f"{whose}, {duration_text(age_seconds)} ago"


def parse_quota(text: str) -> Quota:
    """A quota such as tenant:acme=20GiB or namespace:0123456789ab=0. Raises InvalidRequestError."""
    subject, equals, size = (text := text.strip()).rpartition("=")
    if not equals:
        raise InvalidRequestError(f"quota {text!r} has no size; give SUBJECT=SIZE, such as tenant:acme=20GiB")
    kind, colon, name = subject.partition(":")
    try:
        exact = _exact_size(size)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"quota {text!r}: {error}") from None
    if exact and not 1 <= exact < 1 << 63:
        raise InvalidRequestError(f"quota {text!r}: {size!r} is not between 1 byte and 8 EiB")
    quota = Quota(kind + colon + (name.lower() if kind == "namespace" else name), int(exact))
    quota.check()
    if exact and size[-1].isdigit():  # Most who forget the unit would evict nearly all.
        raise InvalidRequestError(f"quota {text!r} has no unit; give {text}GiB, or {text}B if you mean bytes")
    return quota


def covers(subject: str, tenant: str, fingerprint: bytes) -> bool:
    """Whether a namespace's entries count towards the quota of a subject."""
    kind, _, name = subject.partition(":")
    return name == tenant if kind == "tenant" else fingerprint.hex().startswith(name)


def beyond_memory(quotas: Sequence[Quota], arena_bytes: int) -> str:
    """A warning if tenants' quotas, or namespaces', together are more than the memory; empty: they are not.

    An excess below a 64th does not count: the server rounds its memory, and what tenants may hold, down to extents.
    """
    for kind in ("tenant", "namespace"):
        wanted = sum(quota.limit_bytes for quota in quotas if quota.subject.startswith(f"{kind}:"))
        if wanted - arena_bytes > arena_bytes // 64:
            return (
                f"the quotas of {kind}s add up to {size_text(wanted)}, and the pool's memory is "
                f"{size_text(arena_bytes)}: a {kind} below its quota may lose blocks to others; lower the quotas, or "
                "give the server more --memory"
            )
    return ""


def parse_size(size: str) -> int:
    """Bytes of a size such as 512MiB or 1.5 TiB. Raises InvalidRequestError."""
    return int(_exact_size(size))


def _exact_size(size: str) -> Fraction:
    match = _SIZE.fullmatch(size.strip())
    if match is None or match[2].lower() not in _BY_LOWER:
        raise InvalidRequestError(f"{size!r} is not a size; give bytes, or 512MiB, 20GiB, 1.5TiB")
    return Fraction(match[1]) * _BY_LOWER[match[2].lower()]
