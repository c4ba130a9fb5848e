"""A Redis or Valkey for the directory of peers."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

from tests.support.processes import free_endpoint, wait_for


class DirectoryProcess:
    """One server of a directory, which keeps nothing on disk. It can be killed and started again at its port."""

    def __init__(self, directory: Path):
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        assert program is not None, "neither valkey-server nor redis-server is installed: apt-get install redis-server"
        self._program = program
        self._directory = directory
        self.endpoint = free_endpoint()
        self.url = f"redis://{self.endpoint}/0"
        self.start()

    def start(self) -> None:
        _, _, port = self.endpoint.rpartition(":")
        flags = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", str(self._directory)]
        self._process = subprocess.Popen([self._program, *flags], stdout=subprocess.DEVNULL)
        wait_for(self._answers, "the directory to listen")

    def _answers(self) -> bool:
        host, _, port = self.endpoint.rpartition(":")
        try:
            socket.create_connection((host, int(port)), 1).close()
        except OSError:
            return False
        return True

    def command(self, *words: str) -> str:
        """What a command of the directory answers."""
        host, _, port = self.endpoint.rpartition(":")
        with socket.create_connection((host, int(port)), 5) as connection:
            connection.sendall(" ".join(words).encode() + b"\r\n")
            return connection.recv(1 << 16).decode(errors="replace")

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.wait(10)
