"""The figures of benchmarks.cases.server: whose CPU time and memory they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.cases.server import cpu_s, family, own_bytes, server_process

BUSY = "import os, time\nwhile sum(os.times()[:2]) < 0.5: pass\nprint('done', flush=True); input()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"


def test_cpu_time_is_that_of_a_process_and_its_children() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"done\n"
        assert len(list(family(process.pid))) == 2
        assert 0.5 <= cpu_s(process.pid) < 5
        process.communicate(b"\n")


def test_memory_is_without_the_arena() -> None:
    with server_process("256MiB") as (_, pid):
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert own_bytes(pid) < resident - (256 << 20) + (32 << 20)
        assert 10 << 20 < own_bytes(pid) < 256 << 20
