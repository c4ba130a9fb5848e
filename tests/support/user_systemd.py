"""A systemd of its own: a user's manager, in namespaces and a control group that end with it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.processes import wait_for

NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
OWN_GROUP = "mount -t cgroup2 none /sys/fs/cgroup && mkdir -p /sys/fs/cgroup/$GROUP"
"""On a mount of its own; systemd moves all processes of the group that it takes for the root."""
BEGIN = f"""{OWN_GROUP} && echo $$ > /sys/fs/cgroup/$GROUP/cgroup.procs && exec unshare --cgroup sh -c '
umount /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && mount -t tmpfs none /run &&
mkdir -p /run/systemd/system && systemd --user & wait'"""
END = f"{OWN_GROUP}; until find /sys/fs/cgroup/$GROUP -depth -type d -exec rmdir {{}} +; do sleep 0.05; done"
"""Once the processes are gone."""
START_S, CALL_S = 20.0, 90.0


def why_not() -> str:
    """Why there can be none here, in words; empty if there can."""
    if missing := [tool for tool in ("unshare", "nsenter", "systemd", "systemctl") if not shutil.which(tool)]:
        return f"{', '.join(missing)} not installed (util-linux, systemd)"
    probe = subprocess.run(
        [*NAMESPACES, "sh", "-c", f"{OWN_GROUP} && rmdir /sys/fs/cgroup/$GROUP"],
        env={**os.environ, "GROUP": f"kvpool-probe-{os.getpid()}"},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    return f"no namespace with control groups: {probe.stderr.strip()}" if probe.returncode else ""


class UserSystemd:
    """Runs units. Close it. Not where `why_not`.

    Args:
        directory: of its socket and its units; short, and nobody else's.
        units: their texts by name.
    """

    def __init__(self, directory: Path, units: Mapping[str, str]):
        directory.chmod(0o700)
        places = {"XDG_RUNTIME_DIR": str(directory), "XDG_CONFIG_HOME": str(directory / "config")}
        self._environment = {**os.environ, **places, "GROUP": f"kvpool-{os.getpid()}-{directory.name}"}
        for name, text in units.items():
            path = directory / "config" / "systemd" / "user" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        with (directory / "systemd.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*NAMESPACES, "sh", "-c", BEGIN], env=self._environment, stdin=subprocess.DEVNULL, stderr=log
            )
        wait_for((directory / "systemd" / "private").exists, "systemd's socket", START_S)

    def __call__(self, *arguments: str) -> str:
        """What `systemctl` says; it must succeed."""
        (inner,) = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        enter = ("nsenter", f"--target={inner}", "--mount", "--pid", "--cgroup")
        done = subprocess.run(
            [*enter, "systemctl", "--user", "--no-pager", *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=CALL_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def close(self) -> None:
        self._process.kill()
        self._process.wait(START_S)
        subprocess.run(
            ["unshare", "--mount", "sh", "-c", END],
            env=self._environment,
            stderr=subprocess.DEVNULL,
            timeout=START_S,
            check=True,
        )
