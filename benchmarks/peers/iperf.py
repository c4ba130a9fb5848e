"""iperf3, where it is installed: the rate of one TCP connection over loopback, without Python."""

from __future__ import annotations

import json
import shutil
import subprocess

from benchmarks.harness.measuring import process, wait_until
from testbed.ports import free_port

SECONDS = 2
DEADLINE_S = 30.0


def missing() -> str:
    """Why it cannot be measured; empty if it can."""
    return "" if shutil.which("iperf3") else "iperf3 is not on PATH"


def iperf3_gb_s() -> float:
    """Gigabytes a second that arrive."""
    port = str(free_port())
    with process(["iperf3", "--server", "--one-off", "--forceflush", "--port", port]) as server:
        assert server.stdout is not None
        said = server.stdout
        wait_until(lambda: "listening" in said.readline(), "iperf3", server)
        command = ["iperf3", "--client", "127.0.0.1", "--port", port, "--time", str(SECONDS), "--json"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    return float(json.loads(answer.stdout)["end"]["sum_received"]["bits_per_second"]) / 8e9
