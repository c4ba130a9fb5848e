"""What `--tier` takes, and what its errors say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.protocol.errors import ConfigError
from kvpool_server.cache.eviction.policy import PrefixLRU
from kvpool_server.tiers.registry import KINDS, parse
from kvpool_server.tiers.tier import OpenFiles, TierContext
from tests.contracts.tier_contract import TierContract, awaited, blocks_of, namespace_of


@pytest.mark.parametrize(
    ("tier", "says"),
    [
        ("file:/mnt/kv,size=1MiB", "size=1MiB is not possible; give at least 4.0MiB"),
        ("file:/mnt/kv,size=lots", "size=lots is not possible; give a number of bytes, as 200GiB"),
        ("file:/mnt/kv,size=1GiB,threads=0", "threads=0 is not possible; give at least 1"),
        ("file:/mnt/kv,size=1GiB,threads=65", "threads=65 is not possible; give at most 64"),
        ("file:/mnt/kv,size=1GiB,threads=few", "threads=few is not possible; give a whole number"),
        ("file:/mnt/kv,size=1GiB,io=fast", "io=fast is not possible; give direct, buffered or usrbio"),
        ("file:/mnt/kv,size=1GiB,write=evict", "write=evict is not possible; give through or back"),
        ("file:/mnt/kv,size=1GiB,create=perhaps", "create=perhaps is not possible; give yes or no"),
        ("file:/mnt/kv,size=1GiB,name=a/b", "name=a/b is not possible; give a name of letters, digits, dots, _"),
        ("file:/mnt/kv,size=1GiB,name=..", "name=.. is not possible; give a name of letters, digits, dots, _ and -"),
        ("file:/mnt/kv,size=1GiB,name=.removed-1", "name=.removed-1 is not possible; give a name of letters, digits"),
        ("file:/mnt/kv,size=1GiB,size=2GiB", "option 'size' is given twice; give it once"),
        ("file:/mnt/kv,size=1GiB,owners=root", "owners=root is not possible; give user ids as numbers, as 1000"),
        ("file:/mnt/kv,size=1GiB,owners=", "owners= is not possible; give user ids as numbers, as 1000"),
        ("file:/mnt/kv,size=1GiB,peer_memory=-1", "peer_memory=-1 is not possible; give"),
        ("file:/mnt/kv,size=1GiB,direct", "'direct' is no option; write NAME=VALUE, as in file:/mnt/kv,size=200GiB"),
        (
            "file:/mnt/kv,size=1GiB,colour=red",
            "unknown option 'colour'; choose write, key_file, size, name, threads, io, owners, peer_memory or create",
        ),
        ("file:/mnt/kv,siez=1GiB", "unknown option 'siez'; choose write, key_file, size,"),
        ("file:/mnt/kv,name=a", "option 'size' is missing; add size= (bytes that this server may take there"),
        ("file:kv,size=1GiB", "path=kv is not possible; give an absolute path, as in file:/mnt/kv"),
        ("file:~/kv,size=1GiB", "path=~/kv is not possible; give an absolute path"),
        ("file:,size=1GiB", "path= is not possible; give an absolute path"),
        ("file:", "path is missing; write file:/mnt/kv,size=200GiB"),
        ("mooncake:", "option 'master' is missing; add master= (HOST:PORT of mooncake_master)"),
        ("mooncake:master=here", "master=here is not possible; give HOST:PORT of mooncake_master"),
        ("peers:peer=h:1+", "peer=h:1+ is not possible; give HOST:PORT of another server, or several with +"),
        ("peers:directory=h:1", "directory=h:1 is not possible; give redis://HOST:PORT/DB, or rediss:// with TLS"),
        ("tape:/dev/st0", "unknown kind 'tape'; choose file"),
    ],
)
def test_an_error_names_the_tier_the_option_its_value_and_the_fix(tier: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tier)
    assert str(caught.value).startswith(f"tier {tier!r}: {says}")
    assert "Input should" not in str(caught.value)


def test_every_kind_has_an_example_that_works_and_is_offered() -> None:
    with pytest.raises(ConfigError) as unknown:
        parse("tape:/dev/st0")
    for kind, options in KINDS.items():
        assert options.EXAMPLE in str(unknown.value)
        example = options.EXAMPLE.replace("HOST:PORT", "host:1")
        assert example.startswith(f"{kind}:") and type(parse(example)) is options


@awaited
async def test_tiers_of_a_server_share_the_bound_on_open_files(tmp_path: Path) -> None:
    """Descriptors are the process's, however many tiers it has."""
    context = TierContext(("127.0.0.1", 0), PrefixLRU, open_files=OpenFiles(2))
    namespace = namespace_of(TierContract.spec)
    tiers = []
    for name in "abc":
        options = parse(f"file:{tmp_path / name},size=8MiB,create=yes,io=buffered")
        tiers.append(options.make(context))
        await tiers[-1].open()
        assert tiers[-1].name == options.tier_name
        await tiers[-1].write(namespace.groups[0], blocks_of(name))
    assert len(context.open_files.files) == 2
    for tier in tiers:
        await tier.close()
    assert len(context.open_files.files) == 0


@pytest.mark.parametrize(
    "directory", ["http://user:secret@h:1/0", "redis://user:secret,secret@h:1/0", "redis://:secret@h:1/0,other=1"]
)
def test_no_error_shows_the_password_of_a_directory(directory: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"peers:key_file=k,directory={directory}")
    assert "secret" not in str(caught.value)
