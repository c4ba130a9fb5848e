"""A real Mooncake Store cluster: a master that can be killed and stopped, and a process that holds a segment."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from testbed.mooncake import master_command, segment_command
from testbed.ports import free_port, is_listening
from tests.support.processes import wait_for

ROOT = Path(__file__).parents[2]


class Cluster:
    """One master, and one holder of a segment where a size is given.

    Args:
        segment_bytes: of the holder; 0 for none, where others give memory.

    Attributes:
        address: HOST:PORT of the master.
        master, holder: their processes.
    """

    def __init__(self, segment_bytes: int):
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.holder: subprocess.Popen[str] | None = None
        self.start_master()
        if segment_bytes:
            self.holder = subprocess.Popen(
                segment_command(self.address, segment_bytes),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert self.holder.stdout is not None
            while (line := self.holder.stdout.readline()) != "ready\n":
                assert line, "the holder of the segment has ended"

    def start_master(self) -> None:
        """Starts a master on the same port; it has no records of an earlier one."""
        self.master = subprocess.Popen(master_command(self._port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda: is_listening(self._port), "mooncake_master listens")

    def harm_master(self, way: str) -> None:
        """Leaves the master "there", or has it "killed" or "stopped"; returns when it answers nothing more."""
        if way == "killed":
            self.master.kill()  # Also ends a stopped master.
            self.master.wait()
        elif way == "stopped":
            self.master.send_signal(signal.SIGSTOP)
            os.waitpid(self.master.pid, os.WUNTRACED)

    def restore_master(self) -> None:
        """Starts a master that was killed, or lets one go on that was stopped."""
        if self.master.returncode is None:
            self.master.send_signal(signal.SIGCONT)
        else:
            self.start_master()

    def stop(self) -> None:
        """Ends both processes."""
        if self.holder is not None:
            self.holder.kill()  # Without a master it would take seconds to end by itself.
            self.holder.wait()
            assert self.holder.stdout is not None
            self.holder.stdout.close()
        self.harm_master("killed")
