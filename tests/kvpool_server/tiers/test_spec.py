"""What a file tier may be called."""

from __future__ import annotations

import pytest

from kvpool.errors import ConfigError
from kvpool_server.tiers.spec import FileSpec, parse


@pytest.mark.parametrize("name", [".", "..", ".hidden", ".removed-one-1"])
def test_a_name_that_begins_with_a_dot_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"name = '\..*may not begin with a dot"):
        parse(f"file:/mnt/kv,size=1GiB,name={name}")


@pytest.mark.parametrize("name", ["a", "host-50051", "a..b", "_.x"])
def test_other_names_are_taken(name: str) -> None:
    spec = parse(f"file:/mnt/kv,size=1GiB,name={name}")
    assert isinstance(spec, FileSpec) and spec.name == name
