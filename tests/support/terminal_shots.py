"""Writes the pictures of a terminal in docs/images: `python -m tests.support.terminal_shots [--seconds 60]`.

A server is driven for so long; then each command runs on a terminal of its own, and rich draws what it printed.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
from fcntl import ioctl
from io import StringIO
from pathlib import Path
from termios import TIOCSWINSZ

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from tests.support.page_screenshots import IMAGES, drive, drivers_of
from tests.support.processes import ServerProcess, clean_environment

COLUMNS = 100
SHOTS = {"stats": ("stats",), "top": ("top", "--once"), "doctor": ("doctor",)}
"""Name of the picture -> arguments of `kvpool`."""
MAX_LINES = 30
PORTS = (":50051", ":50052", ":50053")
"""The default ports, which the pictures show in place of the server's own."""


def on_a_terminal(command: list[str], environment: dict[str, str]) -> str:
    """What a command prints on a terminal, with its escape sequences."""
    leader, follower = pty.openpty()
    ioctl(follower, TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment) as process:
        os.close(follower)
        printed = b""
        while True:
            try:
                chunk = os.read(leader, 65_536)
            except OSError:  # The command has closed its terminal.
                break
            if not chunk:
                break
            printed += chunk
        process.wait(30)
    os.close(leader)
    return printed.decode().replace("\r\n", "\n")


def svg(name: str, line: str, printed: str) -> str:
    """The picture of a terminal; it asks no other host for fonts."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    shown = printed.rstrip().splitlines()[:MAX_LINES]
    console.print(Text.from_ansi("\n".join([f"\x1b[1m$ {line}\x1b[0m", *shown])))
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    text = console.export_svg(title="", code_format=plain, unique_id=f"terminal-{name}")
    return "\n".join(each.rstrip() for each in text.splitlines()) + "\n"


def main() -> None:
    """Drives a server and writes all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        server = ServerProcess(Path(directory), "--memory", "64MiB", "--quota", "tenant:acme=48MiB", is_executed=True)
        try:
            with Client(ClientConfig(server.endpoint, timeout_ms=30_000)) as client:
                drive(drivers_of(client), seconds)
            environment = clean_environment(KVPOOL_ENDPOINT=server.endpoint, TERM="xterm-256color")
            own = (server.endpoint, server.http_url.partition("://")[2])
            for name, arguments in SHOTS.items():
                printed = on_a_terminal([sys.executable, "-m", "kvpool.cli", *arguments], environment)
                for ours, port in zip(own, PORTS, strict=False):
                    printed = printed.replace(ours.split("/")[0], f"127.0.0.1{port}")
                path = IMAGES / f"terminal-{name}.svg"
                path.write_text(svg(name, " ".join(["kvpool", *arguments]), printed))
                print(path)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
