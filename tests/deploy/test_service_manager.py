"""The blocks of a pool whose memory systemd keeps: a real one, with what the unit says of restarts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import KVPoolError
from testbed.ports import free_endpoint
from tests.support import user_systemd
from tests.support.processes import wait_for
from tests.support.systemd_unit import ROOT, settings
from tests.support.user_systemd import UserSystemd
from tests.support.values import group_spec, namespace_spec, run_of

pytestmark = pytest.mark.more

NAME = "kvpool-server.service"
OF_RESTARTS = ("Type", "Environment", "FileDescriptorStoreMax", "Restart", "RestartSec", "TimeoutStopSec")
"""The rest of the unit is its sandbox, which a user's manager cannot make."""
SPEC, RUN = namespace_spec(group_spec(chunk_bytes=256), salt="kept by systemd"), run_of(*"abcdefgh")


@pytest.fixture
def endpoint() -> str:
    return free_endpoint()


@pytest.fixture
def systemd(socket_dir: Path, endpoint: str) -> Iterator[UserSystemd]:
    if reason := user_systemd.why_not():
        pytest.skip(reason)
    lines = [f"{name}={value}" for name in OF_RESTARTS for value in settings(name)]
    flags = f'--listen {endpoint} --data-listen 127.0.0.1:0 --http-listen "" --memory 64MiB'
    lines += [f"ExecStart={sys.executable} -m kvpool_server {flags}", f"WorkingDirectory={ROOT}"]
    started = UserSystemd(socket_dir, {NAME: "\n".join(["[Service]", *lines, ""])})
    try:
        started("start", NAME)
        yield started
    finally:
        started.close()


def num_hits(endpoint: str) -> int:
    def found() -> int | None:
        with Client(ClientConfig(endpoint, timeout_ms=2_000)) as client:
            try:
                return client.lookup(client.open_namespace(SPEC), [RUN]).hits[0].num_leading + 1
            except KVPoolError:
                return None

    return wait_for(found, "an answer", 30) - 1


def test_systemd_keeps_the_blocks_over_restarts_and_kills(systemd: UserSystemd, endpoint: str) -> None:
    """Versions before 254 too, which do not say that they keep descriptors."""
    with Client(ClientConfig(endpoint)) as client:
        client.put_blocks(client.open_namespace(SPEC), RUN, [bytes(256)] * len(RUN))
    assert num_hits(endpoint) == len(RUN)
    systemd("restart", NAME)
    assert num_hits(endpoint) == len(RUN)
    pid = systemd("show", "--property=MainPID", "--value", NAME).strip()
    systemd("kill", f"--signal={signal.SIGKILL.name}", NAME)
    wait_for(lambda: systemd("show", "--property=MainPID", "--value", NAME).strip() not in (pid, "0"), "a server", 30)
    assert num_hits(endpoint) == len(RUN)
    systemd("stop", NAME)
    systemd("start", NAME)
    assert num_hits(endpoint) == 0
