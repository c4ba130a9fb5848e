"""Which transport a client takes of those that a server offers, and why."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from kvpool.config import ClientConfig
from kvpool.errors import KVPoolError, TransferError
from kvpool.mooncake import Engine, address_towards
from kvpool.segment import Segment
from kvpool.transport.base import Transport
from kvpool.transport.data import DataTransport, prove
from kvpool.transport.mooncake import MooncakeTransport
from kvpool.transport.shm import ShmTransport
from kvpool.transport.stream import StreamTransport
from kvpool.types import MooncakeInfo, Offer, SegmentInfo

PROVE_S = 3.0
"""How long a data port may take to greet, at least: whoever gives up on it streams through gRPC until the next boot."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport, and why it is this one.

    Args:
        route: how bytes travel, in words.
        is_fallback: whether they go through gRPC, because the faster way over the data port cannot be had.
    """

    transport: Transport
    why: str
    route: str
    is_fallback: bool = False


def choose(config: ClientConfig, offer: Offer, channel: grpc.Channel) -> Choice:
    """Attaches to a server's bytes: as `config.transport` says, or in the best way that works.

    Raises:
        TransferError, UnavailableError, PoolTimeoutError, ConfigError: the transport that was asked for does not work.
    """
    if config.transport == "shm":
        return Choice(_shm(config, offer.segment), "transport=shm", "shm")
    if config.transport == "mooncake":
        return _through_mooncake(config, offer.mooncake, "transport=mooncake")
    if config.transport == "stream":
        return _stream(config, offer, channel, "transport=stream")
    reasons = []
    try:
        return Choice(_shm(config, offer.segment), "client and server share memory", "shm")
    except TransferError as error:
        reasons.append(f"no shm: {error}")
    if offer.mooncake is not None and offer.mooncake.protocol == "rdma":
        try:
            return _through_mooncake(config, offer.mooncake, f"both sides have RDMA; {reasons[0]}")
        except KVPoolError as error:
            reasons.append(f"no mooncake: {error}")
    else:
        reasons.append("no mooncake: the server offers no RDMA")
    return _stream(config, offer, channel, "; ".join(reasons))


def _stream(config: ClientConfig, offer: Offer, channel: grpc.Channel, why: str) -> Choice:
    """Over the data port, if that can be reached; else through gRPC, which is there in any case."""
    stall_s = config.stall_timeout_ms / 1000
    if offer.data_port is None:
        trouble = "the server has no data port; see --data-listen"
    else:
        host = _host(config)
        try:
            prove(offer.data_port, host, max(stall_s, PROVE_S))
        except KVPoolError as error:
            trouble = str(error)
        else:
            transport = DataTransport(offer.data_port, host, config.stream_connections, stall_s, stall_s)
            return Choice(transport, why, f"stream over {transport.route}")
    through_grpc = StreamTransport(channel, config.endpoint, offer.piece_bytes, stall_s)
    return Choice(through_grpc, why, f"stream over gRPC (slow: {trouble})", is_fallback=True)


def _host(config: ClientConfig) -> str:
    return config.endpoint.rpartition(":")[0].strip("[]")


def _shm(config: ClientConfig, segment: SegmentInfo | None) -> ShmTransport:
    if segment is None:
        raise TransferError(f"kvpool-server at {config.endpoint} offers no shared memory; use transport=stream")
    return ShmTransport(Segment.attach(segment))


def _through_mooncake(config: ClientConfig, info: MooncakeInfo | None, why: str) -> Choice:
    transport = _mooncake(config, info)
    return Choice(transport, why, f"mooncake over {info.protocol}" if info is not None else transport.name)


def _mooncake(config: ClientConfig, info: MooncakeInfo | None) -> MooncakeTransport:
    if info is None:
        raise TransferError(
            f"kvpool-server at {config.endpoint} has no Transfer Engine; start it with --mooncake tcp (or rdma), "
            "or use transport=stream"
        )
    transport = MooncakeTransport(
        info, lambda: Engine.start(address_towards(_host(config)), info.protocol), config.stall_timeout_ms / 1000
    )
    try:
        transport.prove(config.data_timeout_ms / 1000)
    except BaseException:
        transport.close()
        raise
    return transport
