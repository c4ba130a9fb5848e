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

PROVE_S = 1.0
"""How long a data port may take to greet, at least: whoever gives up on it streams through gRPC until the next boot."""


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
    if config.transport == "stream":
        return _stream(config, offer, channel, ["transport=stream"])
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
    return _stream(config, offer, channel, reasons)


def _stream(config: ClientConfig, offer: Offer, channel: grpc.Channel, reasons: list[str]) -> Choice:
    """Over the data port, if that can be reached; else through gRPC, which is there in any case."""
    stall_s = config.stall_timeout_ms / 1000
    if offer.data_port is None:
        reasons.append("over gRPC: the server has no data port")
    else:
        host = _host(config)
        try:
            prove(offer.data_port, host, max(stall_s, PROVE_S))
        except KVPoolError as error:
            reasons.append(f"over gRPC: {error}")
        else:
            transport = DataTransport(offer.data_port, host, config.stream_connections, stall_s, stall_s)
            return Choice(transport, "; ".join([*reasons, f"over {transport.place}"]))
    return Choice(StreamTransport(channel, config.endpoint, offer.piece_bytes, stall_s), "; ".join(reasons))


def _host(config: ClientConfig) -> str:
    return config.endpoint.rpartition(":")[0].strip("[]")


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
    transport = MooncakeTransport(
        info, lambda: Engine.start(address_towards(_host(config)), info.protocol), config.stall_timeout_ms / 1000
    )
    try:
        transport.prove(config.data_timeout_ms / 1000)
    except BaseException:
        transport.close()
        raise
    return transport
