"""Real servers with tiers: what one stored outlives it, and others find it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvpool.client.client import Client, Namespace
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun, Lookup, PoolKey
from kvpool.protocol.wire import decode_spec
from tests.support.processes import ServerProcess, clean_environment, run_server, server_command, wait_for
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of

StartServer = Callable[..., ServerProcess]
Connect = Callable[..., Client]
CHUNK, SHARDS = 16 << 10, 4
SLOT = CHUNK * SHARDS
PATIENCE_S = 60.0


def _spec() -> NamespaceSpec:
    return namespace_spec(group_spec(chunk_bytes=CHUNK, num_shards=SHARDS))


def _restarted(pool_server: StartServer, connect: Connect, path: Path) -> tuple[Client, NamespaceSpec]:
    """A client of a server that was restarted: the blocks NAMES of the namespace lie in its file tier alone."""
    flags, spec = ("--memory", "64MiB", *_file(path)), _spec()
    server = pool_server(*flags)
    client = connect(server)
    _put(client, client.open_namespace(spec), NAMES)
    server.stop()
    return connect(pool_server(*flags)), spec


def _put(client: Client, namespace: Namespace, names: Sequence[object]) -> None:
    client.put_blocks(namespace, run_of(*names), [payload(name, SLOT) for name in names])


def _find(client: Client, namespace: Namespace, run: BlockRun, patience_s: float = PATIENCE_S) -> Lookup:
    """Looks up as an engine does: as long as something is on its way it asks again."""
    ends_at = time.monotonic() + patience_s
    found = client.lookup(namespace, [run], prefix_only=True)
    while found.retry_after_ms and time.monotonic() < ends_at:
        time.sleep(found.retry_after_ms / 1000)
        earlier, found = found, client.lookup(namespace, [run], prefix_only=True)
        client.release([earlier.lease_id])
    return found


def _hits(client: Client, namespace: Namespace, names: Sequence[object]) -> int:
    """How many leading blocks come, all of them with the right bytes."""
    found = _find(client, namespace, run_of(*names))
    count = found.hits[0].num_leading
    if count:
        blocks = client.get_blocks(namespace, found.lease_id, run_of(*names[:count]))
        for name, block in zip(names, blocks, strict=False):
            assert block is not None and np.array_equal(block, payload(name, SLOT)), f"wrong bytes for {name}"
        client.release([found.lease_id])
    return count


def _demoted(client: Client) -> int:
    return sum(tier.counters.get("demoted_blocks", 0) for tier in client.admin.stats().tiers)


def _file(path: Path, name: str = "one", **options: object) -> tuple[str, str]:
    more = "".join(f",{key}={value}" for key, value in options.items())
    return "--tier", f"file:{path},size=64MiB,name={name}{more}"


NAMES = [f"t{nth}" for nth in range(64)]
LATER = [f"later{nth}" for nth in range(16)]


def test_a_server_that_was_killed_comes_back_warm(pool_server: StartServer, connect: Connect, tmp_path: Path) -> None:
    spec = _spec()
    server = pool_server("--memory", "64MiB", *_file(tmp_path))
    client = connect(server)
    _put(client, client.open_namespace(spec), NAMES)
    wait_for(lambda: _demoted(client) == len(NAMES), "all blocks are written through")
    server.kill()  # Nothing is flushed then; what is written through is there.
    server = pool_server("--memory", "64MiB", *_file(tmp_path))
    client = connect(server)
    namespace = client.open_namespace(spec)
    assert client.admin.stats().num_entries == 0
    assert _hits(client, namespace, NAMES) == len(NAMES)
    (tier,) = client.admin.stats().tiers
    assert tier.counters["promoted_blocks"] == len(NAMES) and tier.num_entries == len(NAMES)
    assert tier.counters.get("demoted_blocks", 0) == 0, "it has written what it had read"


def test_what_a_tier_holds_is_seen_comes_up_and_is_cleared(
    pool_server: StartServer, connect: Connect, tmp_path: Path
) -> None:
    client, spec = _restarted(pool_server, connect, tmp_path)
    (info,) = client.admin.namespaces()
    assert (decode_spec(info.spec), info.num_entries, info.tiers[0].num_entries) == (spec.listed(), 0, len(NAMES))
    namespace, run = client.open_namespace(spec), run_of(*NAMES, "beyond")
    checked = client.lookup(namespace, [run], prefix_only=True, lease=False)
    assert checked.hits[0].num_pending == 0, "an existence check moves blocks"
    found = client.lookup(namespace, [run_of("elsewhere", *NAMES)], prefix_only=True)
    assert found.hits[0].num_pending == 0 and not found.retry_after_ms, "it is the beginning that is missing"
    found = client.lookup(namespace, [run], prefix_only=True)
    assert found.hits[0].num_leading == 0 and found.lease_id == 0
    assert found.hits[0].num_pending == len(NAMES) and found.retry_after_ms > 0

    def waited() -> Lookup | None:
        found = client.rpc.lookup_async(namespace, [run], locate=True, wait_ms=1_000).result(PATIENCE_S)
        assert found is not None
        return None if found.retry_after_ms else found

    found = wait_for(waited, "the blocks to be up")
    assert found.hits[0].num_leading == len(NAMES)
    assert found.leased(0, 0, len(NAMES)) is not None, "a final answer says where the blocks lie"
    assert _hits(client, namespace, NAMES) == len(NAMES)
    client.release([found.lease_id])
    wait_for(lambda: not client.admin.stats().num_leases, "leases to end")
    client.admin.clear(spec.fingerprint())
    assert client.admin.stats().tiers[0].num_entries == 0, "the tier was not waited for"
    assert _hits(client, namespace, NAMES) == 0


def test_an_inline_get_waits_for_what_is_on_its_way(pool_server: StartServer, connect: Connect, tmp_path: Path) -> None:
    client, spec = _restarted(pool_server, connect, tmp_path)
    fingerprint = client.open_namespace(spec).fingerprint
    keys = [PoolKey(fingerprint, 0, block_hash(name), 3) for name in (*NAMES[::9], "absent")]
    *chunks, absent = client.chunks.get(keys)
    assert absent is None
    parts = [np.split(payload(name, SLOT), SHARDS)[3].tobytes() for name in NAMES[::9]]
    assert [chunk and chunk.payload for chunk in chunks] == parts


def test_a_successor_waits_for_its_predecessor_to_stop_and_has_all_that_it_had(
    pool_server: StartServer, connect: Connect, tmp_path: Path
) -> None:
    """A rolling update: the new server starts while the old one still answers, and drains."""
    spec, tier = _spec(), _file(tmp_path, write="back")
    old = pool_server("--memory", "64MiB", "--drain-ms", "20000", *tier)
    _put(client := connect(old), client.open_namespace(spec), NAMES)
    with ThreadPoolExecutor() as threads:
        starting = threads.submit(ServerProcess, tmp_path / "new", "--memory", "64MiB", *tier)
        log = tmp_path / "new" / "server-0.err"
        wait_for(lambda: log.exists() and "waits for another server" in log.read_text(), "it waits", 60)
        _put(client, client.open_namespace(spec), LATER)
        assert not starting.done()
        old.terminate()
        new = starting.result(timeout=120)
    try:
        assert old.wait() == 0
        client = connect(new)
        namespace = client.open_namespace(spec)
        assert _hits(client, namespace, NAMES) == len(NAMES) and _hits(client, namespace, LATER) == len(LATER)
    finally:
        new.stop()


def test_a_server_that_waits_for_its_predecessor_ends_at_sigterm(pool_server: StartServer, tmp_path: Path) -> None:
    tier = _file(tmp_path)
    pool_server(*tier)
    flags = ("--listen", "127.0.0.1:0", "--http-listen", "", "--drain-ms", "600000", *tier)
    with subprocess.Popen(server_command(*flags), stderr=subprocess.PIPE, env=clean_environment()) as new:
        assert new.stderr is not None
        for line in new.stderr:
            if b"waits for another server" in line:
                break
        new.terminate()
        assert new.wait(30) == 0


@pytest.mark.parametrize(
    ("tier", "says"),
    [
        ("file:/mnt/absent/kv,size=64MiB", "/mnt/absent/kv does not exist; mount it, or add create=yes"),
        ("file:/proc,size=1GiB", "give a directory that this server can write to"),
        ("file:/tmp/kv,size=1GiB file:/tmp/kv,size=2GiB,name=b", "file:/tmp/kv is given twice"),
    ],
)
def test_what_cannot_be_is_said_at_the_start(tier: str, says: str) -> None:
    tiers = [flag for one in tier.split(" ") for flag in ("--tier", one)]
    done = run_server("--listen", "127.0.0.1:0", "--http-listen", "", *tiers)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
    assert not Path("/mnt/absent").exists(), "a missing mount was made on the disk below it"
