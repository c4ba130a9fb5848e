"""What a file tier may be called."""

from __future__ import annotations

import pytest

from kvpool.errors import ConfigError
from kvpool_server.tiers.spec import FileSpec, parse


@pytest.mark.parametrize("name", [".", "..", ".hidden", ".removed-one-1"])
def test_a_name_that_begins_with_a_dot_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"name=\..*may not begin with a dot"):
        parse(f"file:/mnt/kv,size=1GiB,name={name}")


@pytest.mark.parametrize("name", ["a", "host-50051", "a..b", "_.x"])
def test_other_names_are_taken(name: str) -> None:
    spec = parse(f"file:/mnt/kv,size=1GiB,name={name}")
    assert isinstance(spec, FileSpec) and spec.name == name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("size=1MiB", "size=1MiB: give at least 4.0MiB"),
        ("size=lots", "size=lots: give a number of bytes, as 200GiB"),
        ("size=1GiB,threads=0", "threads=0: give at least 1"),
        ("size=1GiB,threads=65", "threads=65: give at most 64"),
        ("size=1GiB,threads=few", "threads=few: give a whole number"),
        ("size=1GiB,io=fast", "io=fast: give 'direct', 'buffered' or 'usrbio'"),
        ("size=1GiB,create=perhaps", "create=perhaps: give yes or no"),
        ("size=1GiB,name=a/b", "name=a/b: it does not match ^[A-Za-z0-9._-]*$"),
        ("size=1GiB,colour=red", "colour is no option of a file tier; options: size= "),
        ("name=a", "size= is missing; options: size= "),
    ],
)
def test_a_wrong_option_is_told_what_to_be(options: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"file:/mnt/kv,{options}")
    assert str(caught.value).startswith(f"tier 'file:/mnt/kv,{options}': {says}")
    assert "Input should" not in str(caught.value)
