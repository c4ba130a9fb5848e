"""Types of settings: each takes a text, checks it, and says in its error what to give instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvpool.client.config import split_address
from kvpool.protocol.errors import InvalidRequestError, KVPoolError
from kvpool.report.quotas import parse_quota, parse_size
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.transport.unix_socket import check_path
from kvpool_server.cache.eviction import POLICIES
from kvpool_server.events.publisher import StreamEndpoints
from kvpool_server.tiers.registry import parse


def _check_endpoint(text: str) -> str:
    scheme, _, place = text.partition("://")
    if scheme == "tcp":
        split_address(place)
    elif scheme != "ipc" or not place:
        raise ValueError("not an endpoint; give tcp://HOST:PORT or ipc://PATH")
    return text


def parse_stream(text: str) -> StreamEndpoints:
    """From TENANT=ENDPOINT or TENANT=ENDPOINT,REPLAY_ENDPOINT. Raises ValueError or KVPoolError."""
    tenant, equals, rest = text.partition("=")
    endpoints = rest.split(",")
    if not equals or len(endpoints) > 2:
        raise ValueError("not a tenant's stream; give TENANT=ENDPOINT,REPLAY_ENDPOINT")
    Principal(tenant, Role.ENGINE_READ)
    return StreamEndpoints(tenant, *map(_check_endpoint, endpoints))


def pin_share(text: str, memory: int) -> float:
    """The share of the memory that a percentage or a size is, 1 at most. Raises ValueError."""
    wrong = "not a budget; give a percentage up to 100%, or a size such as 512MiB or 20GiB"
    number, percent, rest = text.strip().partition("%")
    if percent:
        try:
            share = float(number) / 100
        except ValueError:
            share = math.nan
        if rest or not 0 <= share <= 1:
            raise ValueError(wrong)
        return share
    try:
        nbytes = parse_size(text.strip())
    except InvalidRequestError:
        raise ValueError(wrong) from None
    if nbytes and text.strip()[-1].isdigit():
        raise ValueError("a number without a unit; give a percentage such as 20%, or a size such as 20GiB")
    return min(1.0, nbytes / memory)


def _check_policy(text: str) -> None:
    if text not in POLICIES:
        raise PydanticCustomError("literal_error", "unknown policy", {"expected": " or ".join(POLICIES)})


def _check_tiers(texts: tuple[str, ...]) -> None:
    names = [parse(text).tier_name for text in texts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice; give each place once")


def _check_streams(texts: tuple[str, ...]) -> None:
    if len({parse_stream(text).tenant for text in texts}) < len(texts):
        raise ValueError("a tenant is given twice; give each tenant once")


def _check_quotas(texts: tuple[str, ...]) -> None:
    quotas = list(map(parse_quota, texts))
    subjects = [quota.subject for quota in quotas]
    for text, quota in zip(texts, quotas, strict=True):
        if not quota.limit_bytes:
            raise ValueError(f"{text} gives a size of 0; leave it out: a subject without a quota has no bound")
        if subjects.count(quota.subject) > 1:
            raise ValueError(f"{quota.subject} has two quotas; give one")


def _checked(check: Callable[[Any], object], or_empty: bool = False) -> AfterValidator:
    """A validator that returns the value unchanged; errors of kvpool become pydantic's."""

    def validate(value: Any) -> Any:
        try:
            if value or not or_empty:
                check(value)
        except KVPoolError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(validate)


def _separated_by(separator: str) -> BeforeValidator:
    """A validator that splits a text of the environment; lists of flags and of the file stay."""
    return BeforeValidator(
        lambda value: [part for part in value.split(separator) if part.strip()] if isinstance(value, str) else value
    )


Address = Annotated[str, _checked(split_address)]
AddressOrEmpty = Annotated[str, _checked(split_address, or_empty=True)]
SocketPath = Annotated[str, _checked(check_path, or_empty=True)]
SocketMode = Annotated[
    str, Field(pattern="^0?[0-7]{3}$", title="octal digits for owner, group and others, such as 0660")
]
TrustDomain = Annotated[str, _checked(lambda text: Principal(ALL_TENANTS, Role.OPERATOR, text))]
PolicyName = Annotated[str, _checked(_check_policy)]
PinBudget = Annotated[str, _checked(lambda text: pin_share(text, 1))]
Topic = Annotated[str, Field(pattern="^[^@]*$", title="a text without @, which separates the parts of a topic")]
EventEndpoint = Annotated[str, _checked(_check_endpoint, or_empty=True)]
Texts = Annotated[tuple[str, ...], _separated_by(";")]
Tiers = Annotated[Texts, _checked(_check_tiers)]
EventStreams = Annotated[Texts, _checked(_check_streams)]
Quotas = Annotated[tuple[str, ...], _separated_by(","), _checked(_check_quotas)]
