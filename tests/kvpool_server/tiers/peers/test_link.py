"""Servers on two hosts, with a network between them that is slow and loses packets, with certificates and a tenant."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from testbed.link import End, link, why_not
from tests.support.processes import clean_environment

pytestmark = [pytest.mark.more, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]

ENGINE = Path(__file__).parents[4] / "docs" / "tutorials" / "engine.py"
TRIES = 3
"""A question that is lost is a miss."""


@pytest.mark.parametrize(("delay_ms", "loss"), [(1.0, 0.001), (10.0, 0.01)])
def test_a_prompt_comes_over_a_bad_network(tmp_path: Path, delay_ms: float, loss: float) -> None:
    with link(delay_ms, loss) as (owner, reader), ExitStack() as stack:
        hosts = [word for end in (owner, reader) for word in ("--host", end.address)]
        command = [sys.executable, "-m", "kvpool.cli", "certs", "init", "pki", *hosts, "--tenant", "acme"]
        subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL, env=clean_environment())
        peer = "ca=pki/peer/ca.crt,cert=pki/peer/tls.crt,key=pki/peer/tls.key"
        for end, tier in ((owner, ()), (reader, ("--tier", f"peers:peer={owner.address}:50051,{peer}"))):
            stack.enter_context(_running(end.command(*_server(end), *tier), tmp_path))
        seen = []
        for nth in range(TRIES):
            assert _load(tmp_path, owner, f"prompt {nth}") == "0"
            seen.append(_load(tmp_path, reader, f"prompt {nth}"))
            if seen[-1] == "62":
                break
        assert seen[-1] == "62", seen


@contextmanager
def _running(command: list[str], directory: Path) -> Iterator[None]:
    running = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        running.terminate()
        running.wait(20)


def _server(end: End) -> list[str]:
    names = {"cert": "pki/server/tls.crt", "key": "pki/server/tls.key", "client-ca": "pki/server/ca.crt"}
    flags = [f"--tls-{name}={path}" for name, path in names.items()]
    flags += [f"--listen={end.address}:50051", f"--data-listen={end.address}:50053", "--http-listen=", "--memory=64MiB"]
    return [sys.executable, "-m", "kvpool_server", "--keep", "no", *flags]


def _load(directory: Path, end: End, model: str) -> str:
    """How many of 62 blocks an engine at one end has loaded, whose bytes it has compared; it stores the others."""
    tls = directory / "pki" / "tenants" / "acme" / "engine-write"
    asked = [sys.executable, str(ENGINE), "--endpoint", f"{end.address}:50051", "--tls", str(tls), "--model", model]
    done = None
    for _ in range(100):  # The server may not listen yet.
        done = subprocess.run(end.command(*asked), capture_output=True, text=True, timeout=60, env=clean_environment())
        if not done.returncode:
            return done.stdout.split()[2]
    raise AssertionError(done)
