"""The code blocks of a Markdown page, and a shell that runs them in their order.

A comment directly above a block, which no reader of the rendered page sees, says how it runs:

    <!-- not run: needs vLLM -->            not at all, for this reason
    <!-- run: fails -->                     and must end with a status that is not 0
    <!-- run: continues -->                 behind the page's Python blocks before it, in one program
    <!-- run by: tests/test_x.py::test_y --> this test runs it
    <!-- run: prints -->                    no command: lines that the command before it has printed, but for numbers

Without a comment `bash` and `sh` run in one shell a page, and `python` as a program of its own. What a reader types in
another terminal, or has done before, is in a comment of its own:

    <!-- run first
    kvpool certs init pki --host localhost
    -->

`<!-- run first python` begins a Python program, which the next block may continue. `stand_in 5d0c31 NAME` replaces an
example's name in the blocks behind it. `kvpool-server` goes on in the background once it is ready, with a small arena;
another one at the same address replaces it. `kvpool events` and `top` end by themselves. Default ports, host
names and places outside of the working directory are replaced by the test's own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from testbed.ports import free_port

ROOT = Path(__file__).parents[2]
SHELL = ("bash", "sh")
PYTHON = ("python",)
PORTS = (
    *("50051", "50052", "50053", "50061", "50062", "50063", "50071", "50072", "50073"),
    *("5557", "5558", "5567", "5568", "6390"),
)
"""Ports that pages name: each is a free one in a test."""
HOSTS = {r"\b(kvpool|pool)\.example\.com\b": "localhost", r"\bHOST(?=:\d)": "127.0.0.1"}
PLACES = ("/mnt/", "/run/kvpool", "/var/lib/kvpool", "/etc/kvpool", "/tmp/")
BLOCK_S = 60.0

_BLOCK = re.compile(
    r"(?:^[ ]*<!-- (?P<how>(?:not run|run by|run): .+?) -->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>[a-z]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*$"
    r"|^[ ]*<!-- run first(?P<python> python)?\n(?P<first>.*?)^[ ]*-->$",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"[0-9a-f]{8,}|\d[\d,.]*|[█░▏▎▍▌▋▊▉]+")


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a page.

    Attributes:
        how: the comment above it, without its marks; empty if there is none.
        line: of its first line of text.
    """

    language: str
    text: str
    how: str
    line: int

    @property
    def is_code(self) -> bool:
        return self.language in (*SHELL, *PYTHON)

    @property
    def is_run(self) -> bool:
        return not self.how.startswith(("not run:", "run by:"))

    @property
    def reason(self) -> str:
        """Why a block is not run."""
        return self.how.removeprefix("not run:").strip()


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in their order; what is done first is one of the language `bash`."""
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["first"] is not None:
            yield Block("python" if found["python"] else "bash", textwrap.dedent(found["first"]), "run first", line)
        else:
            yield Block(found["language"], textwrap.dedent(found["text"]), found["how"] or "", line)


class Session:
    """A shell in a directory of its own that runs a page's blocks; `close` ends it and all that it has started."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._bin = directory / ".bin"
        self._bin.mkdir(parents=True)
        self._ports: dict[str, str] = {}
        self._num_run = 0
        self._programs: list[str] = []
        for name, script in (("kvpool-server", SERVER), ("kvpool", COMMAND)):
            (self._bin / name).write_text(script.format(python=sys.executable, bin=self._bin))
            (self._bin / name).chmod(0o755)
        ours = {"KVPOOL_ENDPOINT": "50051", "KVPOOL_LISTEN": "50051", "KVPOOL_HTTP_LISTEN": "50052"}
        ours["KVPOOL_DATA_LISTEN"] = "50053"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")} | {
            **{name: f"127.0.0.1:{self._port(port)}" for name, port in ours.items()},
            "PATH": f"{self._bin}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "160",
            "HOME": str(directory),
        }
        self._shell = subprocess.Popen(
            ["bash", "--norc"], cwd=directory, env=environment, stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        self._tell('set -o pipefail; stand_in() { echo "s|$1|$2|g" >> .bin/stand-ins; }; touch .bin/stand-ins\n')

    def run(self, block: Block) -> str:
        """Runs a block and returns what it has printed; AssertionError if it fails, or does not where it should."""
        self._num_run += 1
        done, out = (self._bin / f"{what}-{self._num_run}" for what in ("done", "out"))
        program = self._program(block)
        self._tell(
            f"sed -f .bin/stand-ins {program} > {program}.run\n"
            f"( set +e; true ); {{ {self._start(block, program)}; }} > {out} 2>&1 < /dev/null\n"
            f"echo $? > {done}.part; mv {done}.part {done}\n"
        )
        ends_at = time.monotonic() + BLOCK_S
        while not done.exists():
            assert self._shell.poll() is None, f"the shell has ended: {out.read_text()}"
            assert time.monotonic() < ends_at, f"not done within {BLOCK_S} s: {block.text}\n{out.read_text()}"
            time.sleep(0.01)
        status, printed = int(done.read_text()), out.read_text()
        assert (status != 0) == (block.how == "run: fails"), f"status {status}:\n{block.text}\n{printed}"
        return printed

    def close(self) -> None:
        """Ends the shell and all that it has started."""
        for record in self._bin.glob("server-*.pid"):
            _end(int(record.read_text()))
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.communicate()

    def _port(self, named: str) -> str:
        """The port of this test in place of one that the page names."""
        if named not in self._ports:
            self._ports[named] = str(free_port())
        return self._ports[named]

    def _tell(self, text: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(text)
        self._shell.stdin.flush()

    def _program(self, block: Block) -> Path:
        """A file with the block's text, of this test's own names and ports."""
        text = block.text
        if block.language in PYTHON:
            if block.how == "run: continues":
                text = "\n".join([*self._programs, text])
            else:
                self._programs.clear()
            self._programs.append(block.text)
        for port in PORTS:
            text = re.sub(rf"(?<=[: ]){port}\b", lambda found: self._port(found[0]), text)
        for host, ours in HOSTS.items():
            text = re.sub(host, ours, text)
        for place in PLACES:
            text = re.sub(rf"(?<![\w.]){re.escape(place)}", f"{self._directory}/outside{place}", text)
        path = self._bin / f"block-{self._num_run}{'.py' if block.language in PYTHON else '.sh'}"
        path.write_text(text)
        return path

    def _start(self, block: Block, program: Path) -> str:
        if block.language in PYTHON:
            return f"python {program}.run"
        if block.how == "run: fails":
            return f"( set -e; source {program}.run )"
        return (
            f"set -e; trap 'echo 1 > {self._bin}/done-{self._num_run}' EXIT; source {program}.run; set +e; trap - EXIT"
        )


COMMAND = """#!/bin/bash
end=
case " $* " in
  *" --seconds "*|*" --once "*|*" --help "*) ;;
  *" events "*) end="--seconds 1" ;;
  *" top "*) end=--once ;;
esac
exec {python} -m kvpool.cli "$@" $end
"""
SERVER = """#!/bin/bash
arguments=() listen=$KVPOOL_LISTEN previous=
for each in "$@"; do
  case $previous in --memory) each=64MiB ;; --listen) listen=$each ;; esac
  arguments+=("$each"); previous=$each
  case $each in
    --help|--version) exec {python} -m kvpool_server "$@" ;;
    file:*) place=${{each#file:}}; mkdir -p "${{place%%,*}}" ;;
  esac
done
record={bin}/server-${{listen//[^0-9]/-}}
if [ -e $record.pid ]; then
  old=$(cat $record.pid); kill $old 2>/dev/null
  while kill -0 $old 2>/dev/null; do sleep 0.02; done
fi
: > $record.out  # The subshell below opens it later, and the last server said that it was ready.
setsid {python} -m kvpool_server "${{arguments[@]}}" > $record.out 2>&1 < /dev/null &
echo $! > $record.pid
for nth in $(seq 1500); do
  if grep -q "metrics and health\\|metrics_and_health" $record.out; then cat $record.out; exit 0; fi
  if ! kill -0 $(cat $record.pid) 2>/dev/null; then cat $record.out; exit 1; fi
  sleep 0.02
done
exit 1
"""


def prints(printed: str, block: Block) -> list[str]:
    """The lines of a block that were not printed. Numbers, digests and white space do not count; … is any text."""
    seen = " ".join(_plain(printed).split())
    missing = []
    for line in block.text.splitlines():
        parts = [re.escape(" ".join(_plain(part).split())) for part in line.split("…")]
        if not re.search(".*?".join(parts), seen):
            missing.append(line)
    return missing


def _plain(text: str) -> str:
    return _NUMBER.sub("#", text)


def _end(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
