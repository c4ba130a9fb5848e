"""Settings of the client. Plain frozen values, checked once when they are made."""

from __future__ import annotations

import contextlib
import ipaddress
import math
from dataclasses import dataclass

from kvpool.protocol.errors import ConfigError
from kvpool.security.tls import TlsFiles
from kvpool.transport.unix_socket import check_path, socket_path

TRANSPORTS = ("auto", "shm", "tcp", "grpc", "mooncake", "network")
"""What `ClientConfig.transport` accepts; `kvpool.client.transport_choice` says which transports each value tries."""
DEFAULT_ENDPOINT = "127.0.0.1:50051"
MAX_CONNECTIONS = 16


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError unless the endpoint has the form HOST:PORT or unix:PATH."""
    if endpoint.startswith("unix://"):
        path = endpoint.removeprefix("unix://")
        raise ConfigError(f"endpoint {endpoint!r} is not unix:PATH; leave out //, and give {'unix:' + path!r}")
    if endpoint.startswith("unix:"):
        try:
            check_path(socket_path(endpoint))
        except ValueError as error:
            raise ConfigError(f"endpoint {endpoint!r}: {error}") from None
        return
    if "://" in endpoint:
        scheme, _, rest = endpoint.partition("://")
        raise ConfigError(f"endpoint {endpoint!r} is not HOST:PORT; leave out {scheme}://, and give {rest!r}")
    with contextlib.suppress(ConfigError):
        if split_address(endpoint)[1]:
            return
    raise ConfigError(f"endpoint {endpoint!r} is not HOST:PORT, for example {DEFAULT_ENDPOINT!r}")


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT as a pair. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise ConfigError(f"{address!r} is not HOST:PORT")
    if int(port) > 65535:
        raise ConfigError(f"{port} is not a port; give one of 1 to 65535, or 0 for a free one")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a host is this one, whatever a name server says."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How a client reaches its pool.

    Args:
        endpoint: HOST:PORT of the server, or unix:PATH of its Unix socket.
        transport: how bytes travel: "shm" (same host), "tcp" (the server's data port), "grpc" (slow), "mooncake"
            (Transfer Engine), or "auto": the first that works of shm, mooncake over RDMA, tcp, grpc. "network" is
            "auto" without shm.
        timeout_ms: deadline of every control call. Raise it for a distant server.
        data_timeout_ms: deadline of the bytes of one put or get.
        stream_connections: most connections over which `tcp` spreads a transfer; 0: as many as the cores pay for.
        local_clients: clients that share this host's cores, such as the ranks of one engine.
        stall_timeout_ms: a read over the network that receives nothing for so long fails.
        tls: the client's certificate, its key, and the authority of the server's, or a mapping with their paths by the
            names of `TlsFiles`; None: plaintext, only to this host.
        server_name: name that the server's certificate must have; empty: the host of `endpoint`. Only with `tls`.
        token_file: a file with a bearer token, for servers that know clients by tokens; only with `tls`.
        insecure_network: allow plaintext to other hosts, on a network where nobody reads or changes what you compute.
        otel: make spans of calls for OpenTelemetry, as the OTEL_* variables of the environment say; needs the extra
            `otel`.
        name_key_file: a file with the key that names blocks on the wire, so that neither the server nor other tenants
            can test guesses of prompts; clients share blocks only if it is the same. It is read once.
        lease_ttl_ms: how long blocks found by a lookup stay readable. Must exceed the slowest load.
        ticket_ttl_ms: how long a put may take. Must exceed the slowest write of one put.
    """

    endpoint: str = DEFAULT_ENDPOINT
    transport: str = "auto"
    timeout_ms: int = 1_000
    data_timeout_ms: int = 5_000
    stall_timeout_ms: int = 1_000
    stream_connections: int = 0
    local_clients: int = 1
    lease_ttl_ms: int = 10_000
    ticket_ttl_ms: int = 10_000
    tls: TlsFiles | None = None
    server_name: str = ""
    token_file: str = ""
    name_key_file: str = ""
    otel: bool = False
    insecure_network: bool = False

    def __post_init__(self) -> None:
        for name in ("endpoint", "token_file", "server_name"):
            if not isinstance(value := getattr(self, name), str):
                raise ConfigError(f"{name} is {value!r}; give text")
        if not isinstance(self.insecure_network, bool):
            raise ConfigError(f"insecure_network is {self.insecure_network!r}; give True or False")
        if self.tls is not None:
            object.__setattr__(self, "tls", TlsFiles.of(self.tls))
        elif self.server_name:
            raise ConfigError(f"server_name {self.server_name} without tls proves nothing; give tls with ca, too")
        check_endpoint(self.endpoint)
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport {self.transport!r} is not one of {', '.join(TRANSPORTS)}")
        if self.transport in ("tcp", "mooncake") and socket_path(self.endpoint):
            raise ConfigError(
                f"transport={self.transport} needs an endpoint HOST:PORT; over the Unix socket {self.endpoint!r} bytes "
                "travel by shm or grpc"
            )
        if not _is_whole(self.stream_connections, 0, MAX_CONNECTIONS):
            raise ConfigError(f"stream_connections is {self.stream_connections!r}; give 0 to {MAX_CONNECTIONS}")
        if not _is_whole(self.local_clients, 1):
            raise ConfigError(f"local_clients is {self.local_clients!r}; give 1 or more")
        for name in ("timeout_ms", "data_timeout_ms", "stall_timeout_ms", "lease_ttl_ms", "ticket_ttl_ms"):
            value = getattr(self, name)
            if not _is_whole(value, 1, 600_000):
                raise ConfigError(f"{name} is {value!r}; give whole milliseconds from 1 to 600000")


def _is_whole(value: object, least: int, most: float = math.inf) -> bool:
    """Whether it is an integer within bounds; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
