"""Which of the transports that a server offers a client uses, and why."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import grpc

from kvpool.client.config import ClientConfig, is_loopback, split_address
from kvpool.protocol.errors import KVPoolError, TransferError
from kvpool.transport.base import Transport
from kvpool.transport.grpc import GrpcTransport
from kvpool.transport.helpers import movers_of
from kvpool.transport.mooncake import MooncakeTransport
from kvpool.transport.mooncake_engine import Engine, address_towards
from kvpool.transport.segment import Segment
from kvpool.transport.shm import ShmTransport
from kvpool.transport.tcp import TcpTransport, peer_of
from kvpool.transport.unix_socket import memory_address, receive_memory, socket_path
from kvpool.v1 import pool_pb2 as pb

PROVE_S = 3.0
"""Least time for a data port to send its greeting: a client that gives up uses gRPC for a while."""
KEPT_S = 4.0
"""How long memory that outlives its server stays mapped without a server. A server that makes new memory waits longer
than this for the memory of the last one."""
RETRY_S = (10.0, 320.0)
"""Time until a client that fell back to gRPC tries the faster transports again: at first, and at most."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport, with its name and peer for logs.

    Args:
        why: the setting, or why the faster transports cannot be used.
        is_fallback: True if bytes travel through gRPC although a faster transport was to be used.
    """

    transport: Transport
    route: str
    why: str = ""
    is_fallback: bool = False


Offer = pb.OpenNamespaceResponse | pb.PingResponse
"""A reply that tells of the transports of a server, checked (`kvpool.protocol.replies.offer`)."""
Choose = Callable[[ClientConfig, Offer, grpc.Channel], Choice]


def choose(config: ClientConfig, offer: Offer, channel: grpc.Channel) -> Choice:
    """Attaches to a server's arena by the first of the setting's candidates that works.

    Raises TransferError, UnavailableError, PoolTimeoutError or ConfigError as the last candidate does.
    """
    has_host = not socket_path(config.endpoint)
    candidates = CANDIDATES[config.transport].items()
    *others, (_, attach_last) = [each for each in candidates if has_host or each[0] not in _BY_HOST]
    reasons: list[str] = []
    trouble = ""
    for name, attach in others:
        try:
            choice = attach(config, offer, channel)
        except (KVPoolError, OSError) as error:  # The system may have no memory for the transport's buffers.
            trouble = str(error)
            reasons.append(f"no {name}: {error}")
        else:
            return replace(choice, why="; ".join([*reasons, *filter(None, [choice.why])]))
    choice = attach_last(config, offer, channel)
    if not others:
        return replace(choice, why=f"transport={config.transport}")
    return replace(choice, route=f"{choice.route} (slow: {trouble})", why="; ".join(reasons), is_fallback=True)


def _shm(config: ClientConfig, offer: Offer, _: grpc.Channel) -> Choice:
    if not offer.HasField("segment"):
        if config.tls is not None:
            fix = "; give the endpoint HOST:PORT, for its encrypted data port" if socket_path(config.endpoint) else ""
            raise TransferError(f"kvpool-server at {config.endpoint} shares no memory because it has TLS{fix}")
        raise TransferError(f"kvpool-server at {config.endpoint} offers no shared memory; its log says why")
    token = offer.segment.token
    timeout_s = max(config.stall_timeout_ms / 1000, PROVE_S)
    fd = receive_memory(memory_address(config.endpoint, token), token, timeout_s)
    segment = Segment.attach(fd, offer.segment.nbytes, offer.segment.nonce)
    movers = movers_of(len(os.sched_getaffinity(0)), config.local_clients, cores_a_mover=1)
    try:
        transport = ShmTransport(segment, movers)
    except BaseException:
        segment.close()
        raise
    return Choice(transport, "shm", "client and server share memory")


def _mooncake_over_rdma(config: ClientConfig, offer: Offer, channel: grpc.Channel) -> Choice:
    if offer.mooncake.protocol != "rdma":
        raise TransferError("the server offers no RDMA")
    return replace(_mooncake(config, offer, channel), why="both sides have RDMA")


def _mooncake(config: ClientConfig, offer: Offer, _: grpc.Channel) -> Choice:
    if not offer.HasField("mooncake"):
        raise TransferError(
            f"kvpool-server at {config.endpoint} has no Transfer Engine; start it with --mooncake tcp (or rdma), "
            "or use transport=tcp"
        )
    engine = Engine(address_towards(split_address(config.endpoint)[0]), offer.mooncake.protocol)
    transport = MooncakeTransport(offer.mooncake, engine, config.stall_timeout_ms / 1000)
    try:
        transport.prove(config.data_timeout_ms / 1000)
    except BaseException:
        transport.close()
        raise
    return Choice(transport, f"mooncake over {offer.mooncake.protocol}")


def _tcp(config: ClientConfig, offer: Offer, _: grpc.Channel) -> Choice:
    if not offer.HasField("data_port"):
        raise TransferError("the server has no data port; see --data-listen")
    host, stall_s = split_address(config.endpoint)[0], config.stall_timeout_ms / 1000
    where = offer.data_port.host or host
    if not (offer.data_port.sealed or config.insecure_network or is_loopback(where)):
        raise TransferError(
            f"the data port at {where} is not encrypted; start kvpool-server with TLS, or allow it with "
            "insecure_network"
        )
    peer = peer_of(offer.data_port, host, stall_s)
    with peer.connect(max(stall_s, PROVE_S))[0] as proved:
        # Transfers reach the address that was proved: the resolution of a name has no deadline.
        address = socket.getnameinfo(proved.getpeername(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    peer = replace(peer, host=address[0])
    connections = config.stream_connections or movers_of(len(os.sched_getaffinity(0)), config.local_clients)
    transport = TcpTransport(peer, connections)
    return Choice(transport, f"tcp over {transport.route}")


def _grpc(config: ClientConfig, offer: Offer, channel: grpc.Channel) -> Choice:
    transport = GrpcTransport(channel, config.endpoint, offer.piece_bytes, config.stall_timeout_ms / 1000)
    return Choice(transport, "grpc")


_WITHOUT_SHM: dict[str, Choose] = {"mooncake": _mooncake_over_rdma, "tcp": _tcp, "grpc": _grpc}
CANDIDATES: dict[str, dict[str, Choose]] = {
    "auto": {"shm": _shm, **_WITHOUT_SHM},
    "network": _WITHOUT_SHM,
    "shm": {"shm": _shm},
    "tcp": {"tcp": _tcp},
    "grpc": {"grpc": _grpc},
    "mooncake": {"mooncake": _mooncake},
}
"""For each value of `ClientConfig.transport`: what to try, in order. The first that attaches is used."""

_BY_HOST = frozenset({"mooncake", "tcp"})
"""Transports that reach the server by the host of the endpoint; the endpoint unix:PATH has none."""


class Attachment:
    """The transport of one boot of the server, which all namespaces of a client share. Thread-safe.

    Attributes:
        choice: the transport in use, and why; None while detached.
    """

    def __init__(self, choose: Callable[[Offer], Choice], clock: Callable[[], float] = time.monotonic):
        self._choose = choose
        self._clock = clock
        self._lock = threading.RLock()
        self.choice: Choice | None = None
        self._offer: Offer = pb.OpenNamespaceResponse()
        self._away_since = math.inf
        self._retry_after_s, self._retry_at = RETRY_S[0], 0.0

    def attach(self, offer: Offer) -> Transport:
        """The transport to this boot of the server. Raises as `choose`.

        One to an earlier boot is closed first, unless its memory is that of this boot.
        """
        with self._lock:
            self._away_since = math.inf
            if self.choice is not None and self._offer.boot_token != offer.boot_token:
                if not _shares_memory(self.choice, offer):
                    self.detach()
                self._offer = offer
            if self.choice is None:
                self.choice, self._offer = self._choose(offer), offer
                self._retry_after_s, self._retry_at = RETRY_S[0], self._clock() + RETRY_S[0]
            return self.retry() or self.choice.transport

    def away(self) -> None:
        """The server does not answer: closes the transport, and with it unmaps the server's memory.

        Memory that the next server adopts stays mapped for `KEPT_S`. Call it again while the server is away.
        """
        with self._lock:
            self._away_since = min(self._away_since, self._clock())
            is_kept = self.choice is not None and self._offer.segment.kept and _shares_memory(self.choice, self._offer)
            if not is_kept or self._clock() > self._away_since + KEPT_S:
                self.detach()

    def retry(self) -> Transport | None:
        """The faster transport that replaces a fallback from now on; None if there is no fallback, or nothing faster.

        Call it often: it tries after the first of `RETRY_S`, and waits twice as long after each failure.
        """
        with self._lock:
            if self.choice is None or not self.choice.is_fallback or self._clock() < self._retry_at:
                return None
            found = self._choose(self._offer)
            if found.is_fallback:
                found.transport.close()
                self._retry_after_s = min(2 * self._retry_after_s, RETRY_S[1])
                self._retry_at = self._clock() + self._retry_after_s
                return None
            # The fallback is not closed: transfers may be under way over the client's channel, which stays open.
            self.choice = found
            return found.transport

    def detach(self) -> None:
        """Closes the transport, and with it unmaps the server's memory. Idempotent."""
        with self._lock:
            if self.choice is not None:
                self.choice.transport.close()
                self.choice = None


def _shares_memory(choice: Choice, offer: Offer) -> bool:
    transport = choice.transport
    return isinstance(transport, ShmTransport) and offer.segment.nonce == transport.segment.nonce
