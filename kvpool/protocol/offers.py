"""What a server tells its clients of its transports. Frozen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """The arena's shared memory: the fields of `Segment` in pool.proto."""

    nbytes: int
    nonce: bytes
    nonce_offset: int
    token: bytes


@dataclass(frozen=True, slots=True)
class MooncakeInfo:
    """The server's Transfer Engine: the fields of `MooncakeEngine` in pool.proto."""

    session: str
    protocol: str
    base_address: int
    nbytes: int
    nonce: bytes
    nonce_offset: int


@dataclass(frozen=True, slots=True)
class DataPortInfo:
    """The server's data port: the fields of `DataPort` in pool.proto."""

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
