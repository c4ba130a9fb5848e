"""The data port's wire format: permits and headers, and what no client would send."""

from __future__ import annotations

import itertools
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.types import PERMIT_BYTES
from kvpool.transport.data_port import (
    HEADER_BYTES,
    MAX_BUFFERS,
    MAX_REGIONS,
    PIECE_BYTES,
    REPLY_BYTES,
    Header,
    Kind,
    Reply,
    Signer,
    Status,
    Terms,
    pack_offsets,
    pieces,
    receive_some,
    send_some,
)

U64 = st.integers(0, (1 << 64) - 1)
SIZES = st.integers(1, (1 << 64) - 1)
OFFSETS = st.lists(U64, min_size=1, max_size=20)
TERMS = st.builds(Terms, st.integers(0, 1 << 62), st.integers(0, (1 << 32) - 1))
SIGNER = Signer(b"k" * 32)


def _granted(kind: Kind, holding_id: int, terms: Terms, region_bytes: int, offsets: list[int]) -> Header:
    permit = SIGNER.permit(kind, holding_id, terms, region_bytes, pack_offsets(offsets))
    return Header(kind, 0, len(offsets), region_bytes, holding_id=holding_id, permit=permit)


@given(kind=st.sampled_from([Kind.WRITE, Kind.READ]), id=U64, terms=TERMS, size=SIZES, at=OFFSETS)
def test_a_permit_is_good_for_what_it_was_made_for(kind: Kind, id: int, terms: Terms, size: int, at: list[int]) -> None:
    header = _granted(kind, id, terms, size, at)
    assert len(header.permit) == PERMIT_BYTES
    assert SIGNER.terms(Header.decode(header.encode()), pack_offsets(at)) == terms


def test_a_permit_is_good_for_nothing_else() -> None:
    granted = _granted(Kind.WRITE, 7, Terms(1_000, 3), 64, [0, 64])
    fields = {name: getattr(granted, name) for name in ("kind", "first", "holding_id", "region_bytes", "permit")}
    for change in ({"kind": Kind.READ}, {"holding_id": 8}, {"region_bytes": 65}):
        assert SIGNER.terms(Header(stop=2, **{**fields, **change}), pack_offsets([0, 64])) is None
    for offsets in ([64, 0], [0], [0, 64, 128], [0, 128]):
        assert SIGNER.terms(Header(stop=len(offsets), **fields), pack_offsets(offsets)) is None


@given(nth=st.integers(0, PERMIT_BYTES - 1), bit=st.integers(0, 7))
def test_no_bit_of_a_permit_can_be_changed(nth: int, bit: int) -> None:
    """Its deadline and its entry are among them. Another boot's key makes other permits."""
    header = _granted(Kind.WRITE, 7, Terms(1_000, 3), 64, [0])
    forged = bytearray(header.permit)
    forged[nth] ^= 1 << bit
    assert SIGNER.terms(Header(Kind.WRITE, 0, 1, 64, holding_id=7, permit=bytes(forged)), pack_offsets([0])) is None
    assert Signer(b"l" * 32).terms(header, pack_offsets([0])) is None


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_are_a_sound_header_or_refused(packed: bytes) -> None:
    try:
        header = Header.decode(packed)
    except InvalidRequestError:
        return
    assert 0 <= header.first < header.stop <= MAX_REGIONS
    assert header.kind is Kind.MOVE or header.first == 0
    assert header.region_bytes


@given(st.binary(min_size=REPLY_BYTES, max_size=REPLY_BYTES))
def test_any_bytes_are_a_sound_reply_or_refused(packed: bytes) -> None:
    try:
        status, message_bytes, nbytes = Reply.decode(packed)
    except InvalidRequestError:
        return
    assert status in Status and message_bytes <= 1_024 and nbytes >= 0


def test_too_many_regions_are_refused_and_a_long_message_is_cut() -> None:
    for kind in Kind:
        for first, stop in ((0, 0), (3, 3), (4, 3), (0, MAX_REGIONS + 1)):
            with pytest.raises(InvalidRequestError, match=r"give 1 to 65536"):
                Header.decode(Header(kind, first, stop, 64).encode())
    assert Reply.decode(Reply(Status.INVALID, 0, "x" * 5_000).encode()[:REPLY_BYTES]) == (Status.INVALID, 1_024, 0)


@given(st.lists(st.integers(0, 3 * PIECE_BYTES // 2), max_size=8))
def test_pieces_are_the_same_bytes_in_order_within_bounds(sizes: list[int]) -> None:
    memory = memoryview(np.zeros(sum(sizes), np.uint8))
    ends = np.cumsum([0, *sizes]).tolist()
    cut = list(pieces([memory[start:stop] for start, stop in itertools.pairwise(ends)]))
    assert all(0 < sum(map(len, piece)) <= PIECE_BYTES for piece in cut)
    address = np.frombuffer(memory, np.uint8).ctypes.data if len(memory) else 0
    at = 0
    for part in (part for piece in cut for part in piece):
        assert np.frombuffer(part, np.uint8).ctypes.data == address + at
        at += len(part)
    assert at == sum(sizes)


def test_many_small_buffers_are_several_calls_to_the_kernel() -> None:
    memory = memoryview(np.arange(2_000, dtype=np.uint8))
    cut = list(pieces([memory[nth : nth + 1] for nth in range(len(memory))]))
    assert [len(piece) for piece in cut] == [MAX_BUFFERS] * 3 + [2_000 - 3 * MAX_BUFFERS]
    here, there = socket.socketpair()
    with here, there:
        taken = bytearray(2_000)
        for piece in cut:
            while piece:
                piece = send_some(here, piece)
        for piece in pieces([memoryview(taken)[nth : nth + 5] for nth in range(0, 2_000, 5)]):
            while piece:
                piece = receive_some(there, piece)
    assert bytes(taken) == memory.tobytes()
