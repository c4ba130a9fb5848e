"""What a server tells its clients of its transports. Frozen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """The arena's shared memory.

    Args:
        nbytes: of the arena.
        nonce: also in the memory, at `nonce_offset`.
        token: what the memory socket demands before it hands the memory out.
    """

    nbytes: int
    nonce: bytes
    nonce_offset: int
    token: bytes


@dataclass(frozen=True, slots=True)
class MooncakeInfo:
    """The server's Transfer Engine, and the nonce that a client must read through it.

    Args:
        session: HOST:PORT, the engine's name for its peers.
        protocol: "tcp" or "rdma".
        base_address: of the arena: a region lies at base_address + offset.
        nbytes: of the arena.
        nonce: also at base_address + nonce_offset.
    """

    session: str
    protocol: str
    base_address: int
    nbytes: int
    nonce: bytes
    nonce_offset: int


@dataclass(frozen=True, slots=True)
class DataPortInfo:
    """The server's data port, and the nonce that a client must be greeted with.

    Args:
        host: empty: the host of the gRPC endpoint.
        nonce: differs with every boot.
        sealed: whether its connections are; permits then come with their keys.
    """

    host: str
    port: int
    nonce: bytes
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """The transports that a server offers.

    Args:
        piece_bytes: largest payload of one message of the gRPC transport.
        segment, mooncake, data_port: None where the server has none.
    """

    piece_bytes: int
    segment: SegmentInfo | None = None
    mooncake: MooncakeInfo | None = None
    data_port: DataPortInfo | None = None
