"""A client that fell back to gRPC returns to a faster transport by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvpool.client.transport_choice import RETRY_S, Attachment, Choice, Offer
from kvpool.transport.base import Transport
from kvpool.v1 import pool_pb2 as pb
from tests.support.clock import FakeClock
from tests.support.memory_transport import MemoryTransport

OFFER = pb.PingResponse(piece_bytes=1 << 20, boot_token=7)
OF_ANOTHER_BOOT = pb.PingResponse(piece_bytes=1 << 20, boot_token=8)
OF_KEPT_MEMORY = pb.PingResponse(piece_bytes=1 << 20, boot_token=7, segment=pb.Segment(nonce=bytes(16), kept=True))


@dataclass
class Server:
    """Offers a data port that works, or does not."""

    clock: FakeClock = field(default_factory=FakeClock)
    port_works: bool = False
    asked_at: list[float] = field(default_factory=list)

    def attachment(self) -> Attachment:
        return Attachment(self._choose, self.clock)

    def _choose(self, offer: Offer) -> Choice:
        assert offer in (OFFER, OF_ANOTHER_BOOT, OF_KEPT_MEMORY)
        self.asked_at.append(self.clock())
        transport = MemoryTransport(np.zeros(1, np.uint8))
        return Choice(transport, "tcp" if self.port_works else "grpc", is_fallback=not self.port_works)


def _route(attachment: Attachment) -> str:
    assert attachment.choice is not None
    return attachment.choice.route


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.mark.parametrize(
    "look", [Attachment.retry, lambda attachment: attachment.attach(OFFER)], ids=["retry", "another namespace"]
)
def test_a_fallback_is_left_once_something_faster_works(
    server: Server, look: Callable[[Attachment], Transport | None]
) -> None:
    attachment = server.attachment()
    assert attachment.retry() is None
    slow = attachment.attach(OFFER)
    server.port_works = True
    assert look(attachment) in (None, slow) and _route(attachment) == "grpc"
    server.clock.advance(RETRY_S[0])
    fast = look(attachment)
    assert fast is not None and fast is not slow and _route(attachment) == "tcp"
    asked = len(server.asked_at)
    server.clock.advance(RETRY_S[1])
    assert attachment.retry() is None and attachment.attach(OFFER) is fast, "what is no fallback is kept"
    assert len(server.asked_at) == asked


def test_a_port_that_stays_away_is_tried_less_and_less_often(server: Server) -> None:
    attachment = server.attachment()
    slow = attachment.attach(OFFER)
    for _ in range(2_000):
        server.clock.advance(1.0)
        assert attachment.retry() is None
    gaps = [later - before for before, later in zip(server.asked_at, server.asked_at[1:], strict=False)]
    assert gaps[:7] == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 320.0]
    assert attachment.attach(OFFER) is slow
    server.port_works = True
    assert attachment.attach(OF_ANOTHER_BOOT) is not slow, "another boot is asked at once"


def test_connections_do_not_outlive_a_server_that_is_away_although_its_memory_does(server: Server) -> None:
    """The address of the server may be another when it is back."""
    server.port_works = True
    attachment = server.attachment()
    gone = attachment.attach(OF_KEPT_MEMORY)
    attachment.away()
    assert attachment.attach(OF_KEPT_MEMORY) is not gone
