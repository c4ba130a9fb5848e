"""Pieces of a stream are written and read by hand; protobuf must not be able to tell."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvpool import wire
from kvpool.types import Piece
from kvpool.v1 import pool_pb2 as pb

UINT64 = st.integers(0, 2**64 - 1)


@given(token=UINT64, offset=UINT64, payload=st.binary(min_size=1, max_size=300))
def test_protobuf_reads_what_we_write_and_we_read_what_it_writes(token: int, offset: int, payload: bytes):
    ours = wire.encode_piece(Piece(token, offset, memoryview(payload)))
    theirs = pb.WriteRequest(ticket_id=token, offset=offset, payload=payload).SerializeToString()
    assert ours == theirs
    assert pb.ReadResponse.FromString(ours) == pb.ReadResponse(boot_token=token, offset=offset, payload=payload)
    piece = wire.decode_piece(theirs)
    assert (piece.token, piece.offset, bytes(piece.payload)) == (token, offset, payload)


@pytest.mark.parametrize("nbytes", [127, 128, 16383, 16384, 1 << 20])
def test_lengths_at_the_edges_of_a_varint(nbytes: int):
    payload = bytes(range(256)) * (nbytes // 256 + 1)
    piece = wire.decode_piece(wire.encode_piece(Piece(1, 2, memoryview(payload[:nbytes]))))
    assert bytes(piece.payload) == payload[:nbytes]


@given(st.binary(max_size=60))
def test_any_bytes_are_read_as_protobuf_reads_them(message: bytes):
    try:
        expected = pb.WriteRequest.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            wire.decode_piece(message)
        return
    piece = wire.decode_piece(message)
    assert (piece.token, piece.offset) == (expected.ticket_id, expected.offset)
    assert bytes(piece.payload) == expected.payload


@given(
    parts=st.permutations(range(3)), token=UINT64, offset=UINT64, payload=st.binary(max_size=40), extra=st.booleans()
)
def test_fields_in_any_order_and_fields_of_tomorrow(
    parts: list[int], token: int, offset: int, payload: bytes, extra: bool
):
    fields = [
        pb.WriteRequest(ticket_id=token).SerializeToString(),
        pb.WriteRequest(offset=offset).SerializeToString(),
        pb.WriteRequest(payload=payload).SerializeToString(),
    ]
    unknown = b"\x78\x05" if extra else b""  # Field 15, a varint.
    message = b"".join(fields[part] for part in parts) + unknown
    piece = wire.decode_piece(message)
    assert (piece.token, piece.offset, bytes(piece.payload)) == (token, offset, payload)
