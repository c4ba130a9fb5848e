"""Quotas as people write them."""

import pytest

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.text import covers, parse_quota, size_text
from kvpool.protocol.types import Quota


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("tenant:acme=20GiB", Quota("tenant:acme", 20 << 30)),
        (" tenant:a=b=1.5 TiB ", Quota("tenant:a=b", 3 << 39)),
        ("tenant:Acme=5mb", Quota("tenant:Acme", 5_000_000)),
        ("tenant:acme=0", Quota("tenant:acme", 0)),
        ("namespace:0123ABCD=77B", Quota("namespace:0123abcd", 77)),
    ],
)
def test_quotas(text: str, quota: Quota) -> None:
    assert parse_quota(text) == quota


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tenant:acme", "has no size"),
        ("tenant:acme=", "'' is not a size"),
        ("tenant:acme=-1", "'-1' is not a size"),
        ("tenant:acme=1XB", "'1XB' is not a size"),
        ("tenant:acme=0.1", "not between 1 byte and 8 EiB"),
        ("tenant:acme=9000PiB", "not between 1 byte and 8 EiB"),
        (" tenant:acme=20 ", "has no unit; give tenant:acme=20GiB, or tenant:acme=20B if you mean bytes"),
        ("tenant:=1", "quota subject 'tenant:' is neither"),
        ("model:acme=1", "quota subject 'model:acme' is neither"),
        ("acme=1GiB", "quota subject 'acme' is neither tenant:NAME nor namespace:FINGERPRINT; give tenant:acme"),
        ("namespace:0123abc=1", "give the first 8 characters"),
        (f"namespace:{'a' * 65}=1", "give the first 8 characters"),
    ],
)
def test_what_is_no_quota_is_named(text: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        parse_quota(text)


def test_which_namespaces_a_quota_covers_and_sizes_as_people_read_them() -> None:
    fingerprint = bytes.fromhex("0123abcd") + bytes(28)
    for subject, tenant, is_covered in (
        ("tenant:acme", "acme", True),
        ("tenant:acme", "acme inc", False),
        ("namespace:0123abcd00", "", True),
        ("namespace:0123abcd01", "", False),
    ):
        assert covers(subject, tenant, fingerprint) is is_covered
    sizes = [0, 999, 1_000, 1_536, 20 << 30, 1_023 << 20]
    assert [size_text(each) for each in sizes] == ["0 B", "999 B", "1000 B", "1.5 KiB", "20 GiB", "1023 MiB"]
