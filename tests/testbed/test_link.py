"""A link delays what it carries, loses what it is told to, and leaves nothing behind."""

import subprocess
import sys

import pytest

from testbed.link import link, why_not

ECHO = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as echo:
    echo.bind((sys.argv[1], 7))
    print("ready", flush=True)
    while True:
        echo.sendto(*echo.recvfrom(9000))
"""
ASK = """
import json, socket, sys, time
count, patience_s, came = int(sys.argv[2]), float(sys.argv[3]), []
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
    asks.settimeout(patience_s)
    for nth in range(count):
        sent_at = time.monotonic()
        asks.sendto(nth.to_bytes(4, "big"), (sys.argv[1], 7))
        try:
            while int.from_bytes(asks.recv(9000), "big") != nth:
                pass
            came.append(time.monotonic() - sent_at)
        except TimeoutError:
            pass
print(json.dumps(came))
"""


@pytest.fixture(autouse=True, scope="module")
def _permitted() -> None:
    if reason := why_not():
        pytest.skip(reason)


def _round_trips(count: int, **how: float) -> list[float]:
    """Seconds of each datagram's way to the other end and back, of those that came back."""
    patience_s = 0.05 if how["loss"] else 10.0  # Where nothing is lost, a busy machine has time.
    with link(**how) as (here, there):  # type: ignore[arg-type]
        echo = subprocess.Popen(
            here.command(sys.executable, "-c", ECHO, here.address), stdout=subprocess.PIPE, text=True
        )
        try:
            assert echo.stdout is not None and echo.stdout.readline() == "ready\n"
            ask = there.command(sys.executable, "-c", ASK, here.address, str(count), str(patience_s))
            done = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60)
        finally:
            echo.kill()
            echo.communicate()
    return [float(each) for each in done.stdout.strip("[]\n").split(",") if each]


def test_every_packet_is_as_late_as_it_is_to_be() -> None:
    seconds = _round_trips(50, delay_ms=4.0, loss=0.0)
    assert len(seconds) == 50, "packets were lost"
    assert min(seconds) >= 2 * 0.004


def test_packets_are_lost_as_the_seed_says() -> None:
    back = len(_round_trips(100, delay_ms=0.0, loss=0.3))
    assert 20 <= back <= 80, "about half of what goes there and back should come back"
