"""Hints through the client, and `kvpool pin`, `expire` and `prefetch`, on real servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.client import Client, Namespace
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.hashing import block_hashes
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun, HintKind
from kvpool.v1 import pool_pb2 as pb
from tests.kvpool.conftest import Cli
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import group_spec, namespace_spec, payload

MIB = 1 << 20
SEED = "seed of the engines"
TOKENS = list(range(4 * 16 + 5))
"""4 blocks, and 5 tokens more."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """16 blocks of memory, of which a tenant may pin 4, above a tier."""
    directory = tmp_path_factory.mktemp("hints")
    flags = ("--memory", "16MiB", "--pin-budget", "4MiB", "--tier", f"file:{directory}/tier,size=256MiB,create=yes")
    started = ServerProcess(directory, *flags)
    yield started
    started.stop()


@pytest.fixture
def client(server: ServerProcess, connect: Callable[..., Client]) -> Client:
    client = connect(server)
    client.admin.clear()
    return client


def _spec(**fields: object) -> NamespaceSpec:
    return namespace_spec(group_spec(chunk_bytes=MIB), hash_seed=SEED, hash_block_tokens=16, **{"salt": "s", **fields})


def _run(tokens: list[int]) -> BlockRun:
    return BlockRun(0, block_hashes(tokens, 16, seed=SEED))


def _store(client: Client, namespace: Namespace, tokens: list[int]) -> BlockRun:
    run = _run(tokens)
    client.put_blocks(namespace, run, [payload(each, MIB) for each in run.block_hashes])
    return run


def _present(client: Client, namespace: Namespace, run: BlockRun) -> int:
    return client.lookup(namespace, [run], lease=False).hits[0].num_leading


def _demoted(client: Client, count: int) -> None:
    """Waits until the tier has so many blocks."""
    wait_for(lambda: sum(tier.num_entries for tier in client.admin.stats().tiers) >= count, "the blocks in the tier")


def _others(client: Client, namespace: Namespace, count: int, first: int = 10_000) -> None:
    """Prompts of one block each."""
    for nth in range(count):
        _store(client, namespace, list(range(first + 16 * nth, first + 16 * nth + 16)))


def _prompt(namespace: Namespace, tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "prompt.json").write_text(json.dumps(TOKENS))
    named = ("--prompt", str(tmp_path / "prompt.json"), "--namespace", namespace.fingerprint.hex()[:12])
    return *named, "--hash-seed", SEED


def test_a_pin_is_at_most_a_day_long_and_an_unknown_kind_is_refused(client: Client) -> None:
    namespace = client.open_namespace(_spec())
    run = _store(client, namespace, TOKENS)
    unknown: Any = {"namespace": namespace.fingerprint, "runs": client.rpc.encode_runs([run]), "kind": 9}
    with pytest.raises(InvalidRequestError, match=r"hint of kind 9; this server knows the kinds 1 \(pin\)"):
        client.rpc.call(client.rpc.stub.Hint, pb.HintRequest(**unknown))
    request = pb.HintRequest(
        namespace=namespace.fingerprint, runs=client.rpc.encode_runs([run]), kind=pb.HINT_KIND_PIN, pin_seconds=1 << 31
    )
    assert client.rpc.call(client.rpc.stub.Hint, request).pin_seconds == 86_400
    client.admin.hint(namespace.fingerprint, [run], HintKind.PIN)


def test_kvpool_pin(cli: Cli, client: Client, tmp_path: Path) -> None:
    namespace = client.open_namespace(_spec(tenant="acme"))
    run = _store(client, namespace, TOKENS)
    prompt = _prompt(namespace, tmp_path)
    printed = cli("pin", *prompt, "--seconds", "90")
    assert printed == "4 of the prompt's 4 blocks are pinned for 90 s.\nThe tenant has pinned 4 MiB of 4 MiB.\n"
    assert "tenant acme has pinned 4 MiB of 4 MiB" in cli("quota")
    assert "4 MiB pinned" in cli("namespaces")
    assert "pinned" in cli("stats")
    longer = _store(client, namespace, [*TOKENS, *range(100)])
    assert client.hints.pin(namespace, [longer], 60).num_refused == 6
    assert json.loads(cli("pin", *prompt, "--json")) == {"num_blocks": 4, "num_refused": 0, "num_pending": 0}
    kept = "Blocks that other stored prompts continue stay as they are: name the longest prompt to end their pins.\n"
    assert cli("pin", *prompt, "--end") == f"0 of the prompt's 4 blocks are pinned no longer.\n{kept}"
    client.admin.remove(namespace, [BlockRun(0, longer.block_hashes[4:])])
    assert cli("pin", *prompt, "--end") == "4 of the prompt's 4 blocks are pinned no longer.\n"
    _, err = cli.fails("pin", *prompt, "--seconds", "0", status=2)
    assert "--seconds" in err
    assert _present(client, namespace, run) == 4


def test_kvpool_prefetch(cli: Cli, client: Client, tmp_path: Path) -> None:
    namespace = client.open_namespace(_spec())
    run = _store(client, namespace, TOKENS)
    prompt = _prompt(namespace, tmp_path)
    _demoted(client, 4)
    _others(client, namespace, 30, first=90_000)
    assert _present(client, namespace, run) == 0
    do = "Send the prompt to an engine once and repeat the command, or ask `kvpool explain` what is missing.\n"
    assert cli("pin", *prompt) == f"Nothing is pinned: none of the prompt's 4 blocks is in memory. {do}"
    nothing = _prompt(client.open_namespace(_spec(salt="nothing stored")), tmp_path)
    assert (
        cli("prefetch", *nothing) == f"None of the prompt's 4 blocks is in memory, or on its way up from a tier. {do}"
    )
    assert cli("prefetch", *prompt, "--wait", "30") == "4 of the prompt's 4 blocks are in memory.\n"
    assert _present(client, namespace, run) == 4
    assert json.loads(cli("prefetch", *prompt, "--json"))["num_blocks"] == 4
    assert client.hints.prefetch(namespace, [run]).num_blocks == 4


def test_kvpool_expire(cli: Cli, client: Client, tmp_path: Path) -> None:
    namespace = client.open_namespace(_spec())
    _store(client, namespace, TOKENS)
    assert cli("expire", *_prompt(namespace, tmp_path)) == "4 of the prompt's 4 blocks will be evicted before others.\n"
    assert json.loads(cli("expire", *_prompt(namespace, tmp_path), "--json"))["num_blocks"] == 4
    _store(client, namespace, [*TOKENS[:32], *range(900, 932)])
    _store(client, namespace, TOKENS)
    assert cli("expire", *_prompt(namespace, tmp_path)) == (
        "2 of the prompt's 4 blocks will be evicted before others.\n"
        "Pinned blocks, and those that other stored prompts continue, stay as they are: name the longest prompt.\n"
    )
