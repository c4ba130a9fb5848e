"""Two machines in one: two network namespaces, and between them a link that delays and loses packets.

Needs no privileges, and no netem in the kernel: each end is a user namespace with a network namespace and a TUN device
of its own, and a process in between carries packets from one device to the other, late, and now and then not at all.
Loss is drawn from a seed. Packets are as large as jumbo frames, so that Python keeps up with a few Gbit/s.

`python -m testbed.link end SOCKET ADDRESS MTU CONGESTION` and `... carry FD FD DELAY_MS LOSS SEED` are the
processes of a link. They end with the process that made them, however that ends: the first when their sockets close,
the second when its standard input does.

Source: Linux, Documentation/networking/tuntap.rst; user_namespaces(7).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Of the two ends. Every link has namespaces of its own, so that links never meet."""
MTU = 9000
DELAY_MS = 1.0
LOSS = 0.001
MAX_PACKETS = 20_000
"""On their way in one direction; what comes on top is lost, as in a full router."""
START_S = 15.0
STOP_S = 5.0
DEVICE = "kvpool0"
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
NAMESPACES = ("unshare", "--user", "--map-root-user", "--net")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKETS_A_TURN = 64


def why_not() -> str:
    """Why no link can be made here, in words; empty if one can be."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if not shutil.which(tool)]:
        return f"{', '.join(missing)} not installed (util-linux, iproute2)"
    probe = (*NAMESPACES, "ip", "tuntap", "add", "dev", DEVICE, "mode", "tun")
    done = subprocess.run(probe, capture_output=True, text=True, timeout=START_S, check=False)
    return f"no user namespace with a TUN device: {done.stderr.strip()}" if done.returncode else ""


@dataclass(frozen=True, slots=True)
class End:
    """One side of a link.

    Args:
        address: its own, IPv4.
        pid: of a process in its namespaces.
    """

    address: str
    pid: int

    def command(self, *command: str) -> list[str]:
        """The same command, in this end's namespaces."""
        return ["nsenter", f"--target={self.pid}", "--user", "--preserve-credentials", "--net", *command]


@contextlib.contextmanager
def link(
    delay_ms: float = DELAY_MS, loss: float = LOSS, *, mtu: int = MTU, congestion: str = "", seed: int = 0
) -> Iterator[tuple[End, End]]:
    """Two ends that reach each other; nothing is left of them afterwards.

    Args:
        delay_ms: of each packet, in each direction: a round trip takes twice as long.
        loss: the share of packets that never arrive, 0 to 1.
        congestion: how TCP answers to loss ("reno", "bbr", ... as the machine permits); as the machine does by default.

    Raises:
        RuntimeError: this machine does not permit it; see `why_not`.
    """
    with contextlib.ExitStack() as stack:
        ends, devices = [], []
        for address in ADDRESSES:
            end, device = stack.enter_context(_end(address, mtu, congestion))
            ends.append(end)
            devices.append(device)
        stack.enter_context(_carrier(devices, delay_ms, loss, seed))
        for device in devices:
            os.close(device)
        yield ends[0], ends[1]


@contextlib.contextmanager
def _end(address: str, mtu: int, congestion: str) -> Iterator[tuple[End, int]]:
    """An end, and its device (the caller closes it)."""
    ours, theirs = socket.socketpair()
    ours.settimeout(START_S)
    with ours, theirs:
        arguments = [str(theirs.fileno()), address, str(mtu), congestion]
        command = [*NAMESPACES, sys.executable, "-m", "testbed.link", "end", *arguments]
        running = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
        theirs.close()
        with _stopped(running):
            _, devices, _, _ = socket.recv_fds(ours, 1, 1)
            if not devices:
                assert running.stderr is not None
                raise RuntimeError(f"no end of a link here: {running.stderr.read().strip()}")
            yield End(address, running.pid), devices[0]
            ours.close()


@contextlib.contextmanager
def _carrier(devices: Sequence[int], delay_ms: float, loss: float, seed: int) -> Iterator[None]:
    arguments = [*map(str, devices), str(delay_ms), str(loss), str(seed)]
    command = [sys.executable, "-m", "testbed.link", "carry", *arguments]
    running = subprocess.Popen(command, pass_fds=devices, stdin=subprocess.PIPE)
    assert running.stdin is not None
    with _stopped(running):
        yield
        running.stdin.close()


@contextlib.contextmanager
def _stopped(running: subprocess.Popen[str] | subprocess.Popen[bytes]) -> Iterator[None]:
    """Waits for a process that ends by itself, and ends it where it does not."""
    try:
        yield
    except BaseException:
        running.terminate()
        raise
    finally:
        try:
            running.wait(STOP_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        for stream in (running.stdin, running.stderr):
            if stream is not None:
                stream.close()


def hold_end(report: socket.socket, address: str, mtu: int, congestion: str) -> None:
    """In new namespaces: makes the device, hands it over, and stays until nobody is there any more."""
    if congestion:
        CONGESTION.write_text(congestion)
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    for arguments in (
        ("link", "set", "lo", "up"),
        ("address", "add", f"{address}/24", "dev", DEVICE),
        ("link", "set", DEVICE, "mtu", str(mtu), "txqueuelen", str(MAX_PACKETS), "up"),
    ):
        subprocess.run(("ip", *arguments), check=True)
    socket.send_fds(report, [b"."], [device])
    os.close(device)
    report.recv(1)


def carry(devices: Sequence[int], delay_s: float, loss: float, seed: int, until: int) -> None:
    """Carries packets between two devices until `until` (a file descriptor) is closed from the other side.

    Packets keep their order: each is due as long after it came as every other.
    """
    draw = random.Random(seed).random
    under_way: dict[int, deque[tuple[float, bytes]]] = {device: deque() for device in devices}
    opposite = {devices[0]: devices[1], devices[1]: devices[0]}
    for device in devices:
        os.set_blocking(device, False)
    while True:
        due = min((packets[0][0] for packets in under_way.values() if packets), default=None)
        timeout_s = None if due is None else max(0.0, due - time.monotonic())
        readable, _, _ = select.select([*devices, until], [], [], timeout_s)
        if until in readable:
            return
        for device in readable:
            queue = under_way[opposite[device]]
            for packet in _packets(device):
                if draw() >= loss and len(queue) < MAX_PACKETS:
                    queue.append((time.monotonic() + delay_s, packet))
        for device, queue in under_way.items():
            now = time.monotonic()
            while queue and queue[0][0] <= now:
                with contextlib.suppress(OSError):  # A device whose namespace has gone takes nothing.
                    os.write(device, queue.popleft()[1])


def _packets(device: int) -> Iterator[bytes]:
    """What is there now, and no more than a turn's."""
    for _ in range(_PACKETS_A_TURN):
        try:
            yield os.read(device, 1 << 16)
        except OSError:
            return


def main(arguments: Sequence[str]) -> None:
    """One process of a link."""
    role, *rest = arguments
    if role == "end":
        hold_end(socket.socket(fileno=int(rest[0])), rest[1], int(rest[2]), rest[3])
    else:
        first, second, delay_ms, loss, seed = rest
        carry([int(first), int(second)], float(delay_ms) / 1000, float(loss), int(seed), sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
