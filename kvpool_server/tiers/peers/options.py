"""How a server is told of the other servers that it reads from: the options of `--tier peers:…`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import ByteSize, Field

from kvpool.client.config import ClientConfig, check_endpoint, is_loopback, split_address
from kvpool.protocol.errors import ConfigError
from kvpool.security.tls import TlsFiles
from kvpool_server.process.addresses import EVERYWHERE
from kvpool_server.tiers.block_mac import read_key
from kvpool_server.tiers.peers.directory import Directory
from kvpool_server.tiers.peers.leases import LEASE_MS
from kvpool_server.tiers.peers.tier import CONTROL_MS, DATA_MS, STALL_MS, PeersTier
from kvpool_server.tiers.tier import TierContext, TierOptions


class PeersOptions(TierOptions):
    """Other kvpool servers, whose memory this one reads."""

    EXAMPLE: ClassVar[str] = "peers:peer=HOST:PORT"

    peer: str = Field(
        "",
        pattern=r"^([^,+]+:\d+(\+[^,+]+:\d+)*)?$",
        title="HOST:PORT of another server, or several with + between them",
        description="HOST:PORT of another server; + stands between several",
    )
    directory: str = Field(
        "",
        pattern="^(rediss?://|$)",
        title="redis://HOST:PORT/DB, or rediss:// with TLS",
        description="redis://HOST:PORT/DB of a Redis or Valkey in which servers say what they have; needs key_file",
    )
    advertise: str = Field(
        "",
        description="HOST:PORT by which other servers reach this one; default: as in --listen, or the host's name",
    )
    transport: Literal["auto", "tcp", "network", "grpc"] = Field(
        "auto", description="how bytes travel; auto: the first that works of shm, mooncake over RDMA, tcp, grpc"
    )
    ca: str = Field("", description="authority of the peers' certificates; none: they have no TLS")
    cert: str = Field("", description="certificate of this server as a client, of role peer")
    key: str = Field("", description="its key")
    name: str = Field("", description="name in the peers' certificates; default: the host of each")
    token_file: str = Field("", description="instead of cert: file with a token of role peer")

    handover: ByteSize = Field(
        ByteSize(0), ge=0, description="SIZE that other servers are asked to read when this server drains; 0: none"
    )

    @property
    def tier_name(self) -> str:
        return f"peers:{self.peer}" if self.peer else "peers"

    def make(self, context: TierContext) -> PeersTier:
        """Raises ConfigError for options that cannot be together."""
        if not (self.peer or self.directory):
            raise ConfigError("tier peers: names no servers; give peer=HOST:PORT or directory=redis://HOST:PORT/0")
        if self.write != "through":
            raise ConfigError(f"tier {self.tier_name}: write={self.write} is not possible: nothing is written to peers")
        if self.key_file and not self.directory:
            raise ConfigError(f"tier {self.tier_name}: key_file is the key of a directory; give directory=, too")
        if (self.cert or self.key or self.name) and not self.ca:
            raise ConfigError(f"tier {self.tier_name}: cert, key and name have no effect without ca; give it, too")
        if self.advertise and not self.directory:
            raise ConfigError(f"tier {self.tier_name}: advertise={self.advertise} is for a directory; give directory=")
        tls = TlsFiles(self.ca, self.cert, self.key) if self.ca else None
        config = ClientConfig(
            "127.0.0.1:1", self.transport, CONTROL_MS, DATA_MS, STALL_MS, lease_ttl_ms=LEASE_MS, tls=tls,
            server_name=self.name, token_file=self.token_file, insecure_network=context.insecure_network,
        )  # fmt: skip
        peers = list(filter(None, self.peer.split("+")))
        for peer in peers:
            host, port = split_address(peer)
            is_here = host == context.listen[0] or (is_loopback(host) and context.listen[0] in EVERYWHERE)
            if peer == self.advertise or (is_here and port == context.listen[1]):
                raise ConfigError(f"tier {self.tier_name}: peer={peer} is this server; give other servers alone")
        directory = self._directory(context) if self.directory else None
        return PeersTier(
            self.tier_name, config, peers, directory, self.handover,
            own_boot_token=context.boot_token, arena=context.arena,
        )  # fmt: skip

    def _directory(self, context: TierContext) -> Directory:
        if not self.key_file:
            raise ConfigError(f"tier {self.tier_name}: a directory needs key_file, the same for all of its servers")
        host = context.listen[0] if context.listen[0] not in EVERYWHERE else socket.gethostname()
        if self.advertise:
            check_endpoint(self.advertise)
        elif is_loopback(host) and not is_loopback(urlsplit(self.directory).hostname or ""):
            raise ConfigError(f"tier {self.tier_name}: other servers do not reach {host}; give advertise=HOST:PORT")

        def endpoint() -> str:
            name = f"[{host}]" if ":" in host else host
            return self.advertise or (f"{name}:{port}" if (port := context.port()) else "")

        return Directory(self.directory, read_key(Path(self.key_file)), endpoint)
