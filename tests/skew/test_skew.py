"""Clients and servers of other releases: neighbours work together, all others are refused by name.

The previous release is built from git; later ones are copies of this one with another protocol. Each side is a process
of its own release. The matrix is printed at the end of the run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.protocol.namespace import OWN
from kvpool.security.certificates import Authority
from kvpool.security.principal import Principal, Role
from kvpool.security.tls import TlsFiles
from kvpool.version import PROTOCOL
from tests.conftest import PRINTED
from tests.skew.releases import CURRENT, ROOT, Tree, later, previous
from tests.support.certificates import server_flags
from tests.support.processes import ServerProcess, clean_environment

PEER = Path(__file__).with_name("peer.py")
NAMES = ("previous", "current", "next", "unknown")
TRANSPORTS = ("shm", "tcp", "grpc")
THROUGH_GRPC = "IncompatibleReleaseError", "TransferError"
"""What clients get whose bytes would go through gRPC beside the previous release, which has `Write` and `Read`."""


def _transports(client: Tree, server: Tree) -> tuple[str, ...]:
    """By which bytes move between two releases."""
    return TRANSPORTS if (client.name == "previous") == (server.name == "previous") else TRANSPORTS[:-1]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tree]:
    folder = tmp_path_factory.mktemp("releases")
    return {
        "previous": previous(folder / "previous"),
        "current": CURRENT,
        "next": later("next", folder / "next", PROTOCOL + 1),
        "unknown": later("unknown", folder / "unknown", PROTOCOL + 2),
    }


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ServerProcess]]:
    with ExitStack() as stack:

        def start(tree: Tree, *flags: str, **client: Any) -> ServerProcess:
            server = ServerProcess(tmp_path_factory.mktemp("servers"), *flags, tree=tree.path, **client)
            stack.callback(server.stop)
            return server

        yield start


def _peer(tree: Tree, endpoint: str, transports: tuple[str, ...], theirs: list[str], tls: str = "") -> dict[str, Any]:
    """What a client of a release says of a server."""
    asked = {"endpoint": endpoint, "transports": transports, "name": tree.name, "theirs": theirs, "tls": tls}
    done = subprocess.run(
        [sys.executable, str(PEER), json.dumps(asked)], cwd=tree.path, env=clean_environment(PYTHONPATH=str(tree.path)),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert Path(said["file"]).is_relative_to(tree.path), "the client is of another release than it should be"
    return said


@pytest.mark.parametrize("serving", NAMES)
def test_neighbours_work_together_and_others_are_refused_by_name(
    trees: dict[str, Tree], serve: Callable[..., ServerProcess], serving: str, record_property: Callable[..., None]
) -> None:
    server = serve(trees[serving])
    stored: list[str] = []
    row = []
    for calling in NAMES:
        client = trees[calling]
        transports = _transports(client, trees[serving])
        said = _peer(client, server.endpoint, transports, stored)
        assert said["wrong"] == [], (calling, serving)
        if client.works_with(trees[serving]):
            assert said["error"] == "", (calling, serving, said)
            stored += [f"{calling} {transport}" for transport in transports]
            row.append(f"{calling} works")
            if "grpc" not in transports:
                assert _peer(client, server.endpoint, ("grpc",), [])["error"] in THROUGH_GRPC
            continue
        _check_refusal(client, trees[serving], said)
        row.append(f"{calling} is refused")
    if serving == "current":
        assert _peer(trees["unknown"], server.endpoint, ("grpc",), [])["error"]
        assert server.stderr.count("refused a client of another release") == 1, "a server logs a refusal once"
        assert f"kvpool {OWN}" in server.stderr and f"(protocol {PROTOCOL + 2})" in server.stderr
    record_property(PRINTED, f"skew: server {serving} (protocol {trees[serving].protocol}), clients: {', '.join(row)}")


def _check_refusal(client: Tree, server: Tree, said: dict[str, Any]) -> None:
    knows_the_name = client.protocol > 0
    assert said["error"] == ("IncompatibleReleaseError" if knows_the_name else "IncompatibleNamespaceError")
    older = "client" if client.protocol < server.protocol else "server"
    least = max(client.protocol, server.protocol) - 1
    for tree in (client, server):
        assert f"(protocol {tree.protocol})" in said["text"]
    assert said["text"].endswith(f"upgrade the {older} to protocol {least} or later")


@pytest.mark.parametrize(("serving", "calling"), [("previous", "current"), ("current", "previous")])
def test_neighbours_work_together_over_tls(
    trees: dict[str, Tree], serve: Callable[..., ServerProcess], tmp_path: Path, serving: str, calling: str
) -> None:
    authority = Authority.create(tmp_path / "pki")
    engine = authority.issue_principal(Principal("acme", Role.ENGINE_WRITE))
    server = serve(
        trees[serving],
        *server_flags(authority.issue_server([])),
        "--memory",
        "64MiB",
        tls=TlsFiles.in_directory(engine),
    )
    said = _peer(trees[calling], server.endpoint, ("tcp",), [], str(engine))
    assert (said["error"], said["wrong"]) == ("", []), said["text"]


def test_a_file_tier_survives_an_upgrade_and_its_rollback(
    trees: dict[str, Tree], serve: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    stored: list[str] = []
    for name in ("previous", "current", "previous"):
        server = serve(trees[name], "--tier", f"file:{tmp_path},name=one,size=64MiB")
        said = _peer(replace(CURRENT, name=f"{name} {len(stored)}"), server.endpoint, ("tcp",), stored)
        assert (said["error"], said["wrong"]) == ("", []), (name, said["text"])
        stored.append(f"{name} {len(stored)} tcp")
        server.terminate()
        assert server.wait() == 0


@pytest.mark.parametrize(
    ("owning", "reading"), [("previous", "current"), ("next", "current"), ("current", "next"), ("unknown", "current")]
)
def test_a_server_reads_from_those_of_neighbouring_releases(
    trees: dict[str, Tree], serve: Callable[..., ServerProcess], owning: str, reading: str
) -> None:
    owner = serve(trees[owning])
    assert _peer(trees[owning], owner.endpoint, ("tcp",), [])["error"] == ""
    server = serve(trees[reading], "--tier", f"peers:peer={owner.endpoint},transport=tcp")
    said = _peer(trees[reading], server.endpoint, ("tcp",), [f"{owning} tcp"])
    assert said["error"] == ""
    if trees[reading].works_with(trees[owning]):
        assert said["wrong"] == []
    else:
        assert said["wrong"] == [f"tcp: 0 of 3 blocks of '{owning} tcp' were found"]
        assert f"(protocol {PROTOCOL + 2})" in server.stdout + server.stderr


def test_the_protocols_page_names_the_present_version() -> None:
    page = (ROOT / "docs/reference/protocol.md").read_text()
    assert f"The present version is {PROTOCOL}." in page
