"""`Exists` says what an engine would find, and leaves no trace."""

from __future__ import annotations

import pytest

from kvpool.client.client import Client
from kvpool.protocol.errors import InvalidReplyError, InvalidRequestError, UnknownNamespaceError
from kvpool.protocol.replies import existence
from kvpool.protocol.reports import REPORTER_BYTES, ReportRequest
from kvpool.protocol.types import BlockRun
from kvpool.v1 import pool_pb2 as pb
from tests.conftest import Connect, StartServer
from tests.support.processes import ServerProcess
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of

WINDOW = group_spec(kind="sliding_window", window_tokens=18)


def _put(client: Client, namespace: object, *names: str, group_idx: int = 0) -> None:
    run = run_of(*names, group_idx=group_idx)
    client.put_blocks(namespace, run, [payload(name, 256) for name in names])  # type: ignore[arg-type]


def test_what_can_be_used_needs_every_group(shared_server: ServerProcess, connect: Connect) -> None:
    client = connect(shared_server)
    namespace = client.open_namespace(namespace_spec(group_spec(), WINDOW))
    runs = [run_of(*"abcd"), run_of(*"abcd", group_idx=1)]
    _put(client, namespace, *"abcd")
    assert client.exists(namespace.fingerprint, runs).usable_tokens == 0
    for name in "bc":
        _put(client, namespace, name, group_idx=1)
    found = client.exists(namespace.fingerprint, runs)
    assert (found.usable_tokens, found.load_seconds) == (48, 0.0)
    assert [(hit.num_leading, hit.complete) for hit in found.hits] == [(4, 0b1111), (0, 0b0110)]


def test_a_question_is_no_lookup_and_no_use(shared_server: ServerProcess, connect: Connect) -> None:
    client = connect(shared_server)
    namespace = client.open_namespace(namespace_spec(group_spec()))
    _put(client, namespace, "a")

    def counts() -> tuple[int, ...]:
        (info,) = [each for each in client.admin.namespaces() if each.fingerprint == namespace.fingerprint]
        stats = client.admin.stats()
        return info.lookup_blocks, info.lookup_hits, stats.counters["lookups"], stats.counters["lookup_blocks"]

    before = counts()
    for _ in range(3):
        assert client.exists(namespace.fingerprint, [run_of("a", "b")]).usable_tokens == 16
    assert counts() == before
    client.lookup(namespace, [run_of("a", "b")], lease=False)
    assert counts() != before


def test_the_eviction_policy_is_not_told(pool_server: StartServer, connect: Connect) -> None:
    client = connect(pool_server("--memory", "1MiB", "--policy", "lru"))
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=256 << 10)))

    def put(name: str) -> None:
        client.put_blocks(namespace, run_of(name), [bytes(256 << 10)])

    for name in "abcd":
        put(name)
    for _ in range(10):
        client.exists(namespace.fingerprint, [run_of("a")])
    put("e")
    assert client.exists(namespace.fingerprint, [run_of("a")]).usable_tokens == 0
    assert client.exists(namespace.fingerprint, [run_of("b")]).usable_tokens == 16


def test_load_seconds_are_what_engines_have_waited(shared_server: ServerProcess, connect: Connect) -> None:
    client = connect(shared_server)
    namespace = client.open_namespace(namespace_spec(group_spec()))
    _put(client, namespace, "a", "b")
    report = ReportRequest(
        reporter=b"r" * REPORTER_BYTES,
        sequence=1,
        engine="host:1",
        namespaces=(namespace.fingerprint,),
        loaded_tokens=1_600,
        load_seconds=0.5,
    )
    assert client.rpc.report(report, 5_000)
    found = client.exists(namespace.fingerprint, [run_of("a", "b", "c")])
    assert (found.usable_tokens, found.load_seconds) == (32, pytest.approx(0.01))
    assert client.exists(namespace.fingerprint, [run_of("z")]).load_seconds == 0


def test_bad_questions_are_refused(shared_server: ServerProcess, connect: Connect) -> None:
    client = connect(shared_server)
    namespace = client.open_namespace(namespace_spec(group_spec()))
    with pytest.raises(InvalidRequestError, match="a run has a parent_hash; give the blocks of a prompt from"):
        client.exists(namespace.fingerprint, [run_of("b", parent="a")])
    with pytest.raises(UnknownNamespaceError):
        client.exists(block_hash("never opened"), [run_of("a")])


@pytest.mark.parametrize(
    "reply",
    [
        pb.ExistsResponse(),
        pb.ExistsResponse(hits=[pb.RunHits(num_leading=3)]),
        pb.ExistsResponse(hits=[pb.RunHits()], usable_tokens=16),
        pb.ExistsResponse(hits=[pb.RunHits(num_leading=1, complete=b"\x01")], load_seconds=-1),
        pb.ExistsResponse(hits=[pb.RunHits(num_leading=1, complete=b"\x01")], load_seconds=float("nan")),
    ],
)
def test_answers_that_no_question_has_are_refused(reply: pb.ExistsResponse) -> None:
    with pytest.raises(InvalidReplyError):
        existence(reply, [BlockRun(0, [block_hash("a"), block_hash("b")])])
