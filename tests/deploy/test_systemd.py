"""The systemd unit and its files: installed into a root of their own, rated, and started under the unit's sandbox."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from tests.support.processes import clean_environment, wait_for
from tests.support.systemd_unit import ROOT, SYSTEMD, UNIT, settings

HIGHEST_EXPOSURE = 1.1
"""Of 10, from `systemd-analyze security`; lower is better."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _exposure(unit: Path) -> float:
    # Without a pager and colours the last line is "→ Overall exposure level for UNIT: 1.1 OK".
    told = _run("systemd-analyze", "security", "--offline=true", "--no-pager", str(unit))
    return float(re.search(r"Overall exposure level for \S+: ([0-9.]+)", told)[1])  # type: ignore[index]


def test_the_units_exposure_is_what_the_documents_say() -> None:
    page = next((ROOT / "docs").rglob("deploy.md")).read_text()
    assert _exposure(UNIT) <= HIGHEST_EXPOSURE
    assert f"rates the unit {HIGHEST_EXPOSURE} of 10" in page


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """Verified with a program that exists in the place of the server's."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kvpool/bin/kvpool-server", sys.executable))
    told = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")


def test_the_user_and_the_directory_of_the_sockets_are_made(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("systemd-sysusers and systemd-tmpfiles need root")
    for directory in ("etc", "usr/lib/sysusers.d", "usr/lib/tmpfiles.d"):
        (tmp_path / directory).mkdir(parents=True)
    shutil.copy(SYSTEMD / "kvpool.sysusers.conf", tmp_path / "usr/lib/sysusers.d/kvpool.conf")
    shutil.copy(SYSTEMD / "kvpool.tmpfiles.conf", tmp_path / "usr/lib/tmpfiles.d/kvpool.conf")
    _run("systemd-sysusers", f"--root={tmp_path}")
    name, _, uid, gid, *_ = (tmp_path / "etc/passwd").read_text().splitlines()[0].split(":")
    assert [name] == settings("User") == settings("Group")
    _run("systemd-tmpfiles", f"--root={tmp_path}", "--create")
    made = (tmp_path / "run/kvpool").stat()
    assert (made.st_uid, made.st_gid, stat.S_IMODE(made.st_mode)) == (int(uid), int(gid), 0o750)


class Started:
    """The unit's ExecStart line with its settings file, under the unit's sandbox, with the test's paths and ports."""

    def __init__(self, directory: Path):
        self.directory, prefix = directory, str(directory)
        places = {"/etc/kvpool": f"{prefix}/etc", "/run/kvpool": f"{prefix}/run", "/var/lib/kvpool": f"{prefix}/lib"}
        for place in places.values():
            Path(place).mkdir()
        text = (SYSTEMD / "server.toml").read_text()
        (command,) = settings("ExecStart")
        for path, place in places.items():
            text, command = text.replace(path, place), command.replace(path, place)
        command = command.replace("/opt/kvpool/bin", str(Path(sys.executable).parent))
        Path(f"{prefix}/etc/server.toml").write_text(text)
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(f"{prefix}/run/notify")
        os.chmod(f"{prefix}/run/notify", 0o777)
        self.manager.settimeout(60)
        free = {f"KVPOOL_{name}": "127.0.0.1:0" for name in ("LISTEN", "HTTP_LISTEN", "DATA_LISTEN")}
        environment = clean_environment(
            **free, KVPOOL_MEMORY="64MiB", NOTIFY_SOCKET=f"{prefix}/run/notify", PYTHONPATH=str(ROOT)
        )
        confined = [sys.executable, "-m", "tests.support.systemd_unit"]
        with (directory / "log").open("w") as log:
            self.process = subprocess.Popen([*confined, *command.split()], stderr=log, env=environment, cwd=ROOT)

    def log(self) -> list[dict[str, object]]:
        lines = (self.directory / "log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def told(self) -> str:
        return self.manager.recv(4096).decode()

    def stop(self) -> None:
        self.manager.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


@pytest.fixture
def started(socket_dir: Path) -> Iterator[Started]:
    with ExitStack() as stack:
        server = Started(socket_dir)
        stack.callback(server.stop)
        yield server


def test_the_units_command_serves_under_its_sandbox(started: Started) -> None:
    wait_for(
        lambda: started.process.poll() is not None or select.select([started.manager], [], [], 0)[0], "the server", 60
    )
    assert started.process.poll() is None, (started.directory / "log").read_text()
    assert started.told().startswith("READY=1")
    (ready,) = [line for line in started.log() if line["event"] == "ready"]
    with urllib.request.urlopen(f"{ready['metrics_and_health']}/healthz", timeout=10) as answer:
        assert answer.status == 200
    path = f"{started.directory}/run/kvpool.sock"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
    status = Path(f"/proc/{started.process.pid}/status").read_text()
    confined = [r"NoNewPrivs:\s+1", r"Seccomp:\s+2", *([r"CapEff:\s+0+"] if os.geteuid() == 0 else [])]
    assert all(re.search(f"^{line}$", status, re.MULTILINE) for line in confined), status
    with Client(ClientConfig(f"unix:{path}", timeout_ms=10_000)) as client:
        assert client.admin.stats().arena_bytes > 0
    started.process.send_signal(signal.SIGHUP)  # ExecReload=
    started.process.send_signal(signal.SIGTERM)
    assert started.told().startswith("STOPPING=1")
    assert started.process.wait(60) == 0
    assert (started.directory / "lib/ledger.sqlite").exists()


def test_the_unit_gives_the_server_longer_to_stop_than_it_takes_to_drain() -> None:
    from kvpool_server.app.composition import HANDOVER_S
    from kvpool_server.settings.config import ServerConfig

    given = tomllib.loads((SYSTEMD / "server.toml").read_text())
    drain_ms = ServerConfig(**given).drain_ms
    assert int(settings("TimeoutStopSec")[0]) > drain_ms / 1000 + HANDOVER_S
