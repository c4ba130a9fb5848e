"""Which transport a client takes of those that a server offers, and why."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from kvpool.config import ClientConfig
from kvpool.errors import KVPoolError, TransferError
from kvpool.mooncake import Engine, address_towards
from kvpool.segment import Segment
from kvpool.transport.base import Transport
from kvpool.transport.mooncake import MooncakeTransport
from kvpool.transport.shm import ShmTransport
from kvpool.transport.stream import StreamTransport
from kvpool.types import MooncakeInfo, Offer, SegmentInfo


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport, and why it is this one."""

    transport: Transport
    why: str


def choose(config: ClientConfig, offer: Offer, channel: grpc.Channel) -> Choice:
    """Attaches to a server's bytes: as `config.transport` says, or in the best way that works.

    Raises:
        TransferError, UnavailableError, PoolTimeoutError, ConfigError: the transport that was asked for does not work.
    """
    if config.transport == "shm":
        return Choice(_shm(config, offer.segment), "transport=shm")
    if config.transport == "mooncake":
        return Choice(_mooncake(config, offer.mooncake), "transport=mooncake")
    stream = StreamTransport(channel, config.endpoint, offer.piece_bytes, config.stall_timeout_ms / 1000)
    if config.transport == "stream":
        return Choice(stream, "transport=stream")
    reasons = []
    try:
        return Choice(_shm(config, offer.segment), "client and server share memory")
    except TransferError as error:
        reasons.append(f"no shm: {error}")
    if offer.mooncake is not None and offer.mooncake.protocol == "rdma":
        try:
            return Choice(_mooncake(config, offer.mooncake), f"both sides have RDMA; {reasons[0]}")
        except KVPoolError as error:
            reasons.append(f"no mooncake: {error}")
    else:
        reasons.append("no mooncake: the server offers no RDMA")
    return Choice(stream, "; ".join(reasons))


def _shm(config: ClientConfig, segment: SegmentInfo | None) -> ShmTransport:
    if segment is None:
        raise TransferError(f"kvpool-server at {config.endpoint} offers no shared memory; use transport=stream")
    return ShmTransport(Segment.attach(segment))


def _mooncake(config: ClientConfig, info: MooncakeInfo | None) -> MooncakeTransport:
    if info is None:
        raise TransferError(
            f"kvpool-server at {config.endpoint} has no Transfer Engine; start it with --mooncake tcp (or rdma), "
            "or use transport=stream"
        )
    host = config.endpoint.rpartition(":")[0].strip("[]")
    transport = MooncakeTransport(
        info, lambda: Engine.start(address_towards(host), info.protocol), config.stall_timeout_ms / 1000
    )
    try:
        transport.prove(config.data_timeout_ms / 1000)
    except BaseException:
        transport.close()
        raise
    return transport
