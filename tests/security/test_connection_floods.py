"""Frames that a stranger sends without a pause, and without a call: the server does not answer or keep more of them.

Source: RFC 9113 (HTTP/2), 10.5, denial-of-service considerations.
"""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from tests.conftest import StartServer
from tests.security.adversary import flood_for
from tests.support.half_sent import HalfSentCalls
from tests.support.in_process_server import InProcessServer
from tests.support.processes import wait_for
from tests.support.secured_server import SecuredServer

MIB = 1 << 20
NUM_PINGS, NUM_CONNECTIONS = 5_000, 4
FLOOD_S = 6.0
MOST_BYTES = 16 * MIB


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
    secured = SecuredServer(tmp_path, functools.partial(pool_server, is_executed=True), proof="tokens")
    server, grown = secured.server, 0
    before, flood = server.own_bytes, ("WINDOW_UPDATE", NUM_CONNECTIONS, server.endpoint, secured.ca, FLOOD_S)
    with ThreadPoolExecutor(1) as stranger:
        sent = stranger.submit(flood_for, *flood)
        while not sent.done():
            grown = max(grown, server.own_bytes - before)
            time.sleep(0.05)
    assert sent.result() and grown < MOST_BYTES
