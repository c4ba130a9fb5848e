"""The rules that pace and bound connections: in a network namespace, beside a host that makes as many as it can."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(not shutil.which("nft") or os.geteuid() != 0, reason="needs nftables, and root for a namespace"),
]

RULES = Path(__file__).parents[2] / "deploy" / "nftables" / "kvpool.nft"
BURST, A_SECOND, SECONDS, MOST_OPEN = 200, 50, 3, 64
FLOOD = f"""
import socket, struct, threading, time

server = socket.create_server(("::", 50051), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
counts = dict.fromkeys(["::ffff:127.0.0.2", "::ffff:127.0.0.1", "::1"], 0)
ends_at = time.monotonic() + {SECONDS}

def accept():
    while True:
        connection, (host, *_) = server.accept()
        counts[host] += 1
        connection.close()

def connect(source, target, pause_s):
    while time.monotonic() < ends_at:
        with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET) as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            caller.settimeout(0.01 if not pause_s else 5)
            caller.bind((source, 0))
            try:
                caller.connect((target, 50051))
            except OSError:
                assert not pause_s, "an honest host was refused"
        time.sleep(pause_s)

threading.Thread(target=accept, daemon=True).start()
flood = threading.Thread(target=connect, args=("127.0.0.2", "127.0.0.1", 0))
flood.start()
connect("127.0.0.1", "127.0.0.1", 0.05)
flood.join()
ends_at = time.monotonic() + {SECONDS}
connect("::1", "::1", 0)
print(*counts.values())
"""

HELD = f"""
import socket

server = socket.create_server(("::", 50051), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)

def connect(source, target, count):
    held = []
    for _ in range(count):
        caller = socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET)
        caller.settimeout(0.2)
        caller.bind((source, 0))
        try:
            caller.connect((target, 50051))
        except TimeoutError:
            break
        held.append(caller)
    return held

many = connect("127.0.0.2", "127.0.0.1", {2 * MOST_OPEN})
few, many6 = connect("127.0.0.1", "127.0.0.1", 8), connect("::1", "::1", {2 * MOST_OPEN})
print(len(many), len(few), len(many6))
"""


def accepted(rules: str, callers: str = FLOOD) -> tuple[int, int, int]:
    """Connections that came through from one host, from an honest one beside it, and from one over IPv6."""
    begin = f"ip link set lo up && {rules} exec {sys.executable} -c '{callers}'"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", begin], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    flood, honest, flood6 = map(int, done.stdout.split())
    return flood, honest, flood6


def test_a_host_that_connects_without_pause_is_paced_and_others_are_not() -> None:
    most = BURST + 2 * A_SECOND * SECONDS
    unpaced, _, unpaced6 = accepted("")
    assert min(unpaced, unpaced6) > 2 * most
    paced, honest, paced6 = accepted(f"nft -f {RULES} &&")
    assert BURST <= paced <= most and BURST <= paced6 <= most and honest > 10 * SECONDS


def test_a_host_has_a_bound_of_open_connections_and_others_have_theirs() -> None:
    assert accepted("", HELD) == (2 * MOST_OPEN, 8, 2 * MOST_OPEN)
    assert accepted(f"nft -f {RULES} &&", HELD) == (MOST_OPEN, 8, MOST_OPEN)
