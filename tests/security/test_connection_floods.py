"""Frames that a stranger sends without a pause, and without a call: the server does not answer or keep more of them.

Source: RFC 9113 (HTTP/2), 10.5, denial-of-service considerations.
"""

from __future__ import annotations

import functools
import socket
import ssl
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from tests.conftest import StartServer
from tests.support.half_sent import HalfSentCalls
from tests.support.in_process_server import InProcessServer
from tests.support.processes import wait_for
from tests.support.secured_server import SecuredServer

MIB = 1 << 20
NUM_PINGS, NUM_CONNECTIONS = 5_000, 4
FLOOD_BYTES, FLOOD_S = 1024 * MIB, 6.0
MOST_BYTES = 16 * MIB
BEGUN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client sends first: the preface, and settings that are empty."""
WINDOW_UPDATE = bytes((0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1))
"""A frame that lets the server send one more byte."""


def test_a_flood_of_pings_is_answered_by_no_farewells() -> None:
    """Of farewells gRPC would queue one for each ping of a client that reads nothing, and answer nobody meanwhile."""
    with closing(InProcessServer(MIB, MIB)) as server:
        calls = HalfSentCalls(f"127.0.0.1:{server.port}")
        stream = calls.begin("LookupStream")
        calls.ping(NUM_PINGS)
        wait_for(lambda: calls.pongs == NUM_PINGS or calls.farewells, "the answers to all pings")
        assert not calls.farewells and stream not in calls.ended
        calls.close()


def test_a_flood_of_frames_over_tls_fills_no_memory(tmp_path: Path, pool_server: StartServer) -> None:
    server = SecuredServer(tmp_path, functools.partial(pool_server, is_executed=True), proof="tokens").server
    host, _, port = server.endpoint.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    frames, grown = 500 * WINDOW_UPDATE, 0

    def send(stranger: ssl.SSLSocket) -> None:
        with suppress(OSError):  # The server has hung up.
            stranger.sendall(BEGUN)
            for _ in range(FLOOD_BYTES // NUM_CONNECTIONS // len(frames)):
                if time.monotonic() < ends_at:
                    stranger.sendall(frames)

    with ExitStack() as stack:
        strangers = []
        for _ in range(NUM_CONNECTIONS):
            plain = stack.enter_context(socket.create_connection((host, int(port)), 10))
            strangers.append(stack.enter_context(context.wrap_socket(plain)))
        before, ends_at = server.own_bytes, time.monotonic() + FLOOD_S
        threads = [threading.Thread(target=send, args=[stranger]) for stranger in strangers]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            grown = max(grown, server.own_bytes - before)
            time.sleep(0.05)
    assert grown < MOST_BYTES
