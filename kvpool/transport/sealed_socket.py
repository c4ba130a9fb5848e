"""A TCP connection whose bytes nobody else can read, change, replay or reorder: records under AES-256-GCM.

Both sides share a secret (the key of a permit, which travels inside TLS). Each connection derives two keys from it and
from a random number of each side, one for each direction. A record is its plaintext's length (4 bytes, little-endian,
authenticated) and its ciphertext with the tag; its nonce is a counter, so a record is good once, in its place. Records
hold at most `RECORD_BYTES`: what a core's cache holds, so that encryption reads and writes memory once.

Python's ssl module copies every byte twice and reaches a third of this.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvpool.protocol.errors import TransferError

RECORD_BYTES = 1 << 20
RANDOM_BYTES = 16
CHANNEL_ID_BYTES = 16
_KEY_BYTES, _TAG_BYTES = 32, 16
_LENGTH = struct.Struct("<I")
_NONCE = struct.Struct("<4xQ")
_STRANGER = "the peer does not share this connection's secret"
_INFO = b"kvpool data port"


class SealedSocket:
    """The parts of a socket that `kvpool.transport.data_port` uses, over a connected socket. One thread.

    As with a socket, BlockingIOError says that a wait has timed out; the same call then goes on where it was.

    Args:
        secret: what both sides share.
        client_random, server_random: `RANDOM_BYTES`, new for each connection.

    Attributes:
        channel_id: `CHANNEL_ID_BYTES` that no other connection has; the same on both sides.
    """

    def __init__(
        self, plain: socket.socket, secret: bytes, client_random: bytes, server_random: bytes, *, is_client: bool
    ):
        self._plain = plain
        derived = HKDF(
            hashes.SHA256(), 2 * _KEY_BYTES + CHANNEL_ID_BYTES, salt=client_random + server_random, info=_INFO
        ).derive(secret)
        ours, theirs = AESGCM(derived[:_KEY_BYTES]), AESGCM(derived[_KEY_BYTES : 2 * _KEY_BYTES])
        self._seal, self._open = (ours, theirs) if is_client else (theirs, ours)
        self.channel_id = derived[2 * _KEY_BYTES :]
        self._num_sealed = self._num_opened = 0
        self._outgoing = memoryview(bytearray(_LENGTH.size + RECORD_BYTES + _TAG_BYTES))
        self._unsent = self._outgoing[:0]
        self._sending_bytes = 0
        self._incoming = memoryview(bytearray(_LENGTH.size + RECORD_BYTES + _TAG_BYTES))
        self._num_received = 0
        self._gathered = self._opened = memoryview(b"")
        self._unread = memoryview(b"")

    # Sending

    def send_some(self, buffers: list[memoryview]) -> list[memoryview]:
        """Sends a record of the buffers' first bytes; returns the buffers without them.

        Call it again with the same buffers until it has returned: the record may be sent in part before.
        """
        if not self._unsent:
            self._seal_record(buffers)
        self._unsent = self._unsent[self._plain.send(self._unsent) :]
        return buffers if self._unsent else without(buffers, self._sending_bytes)

    def sendall(self, data: bytes) -> None:
        left = [memoryview(data)]
        while left:
            left = self.send_some(left)

    def _seal_record(self, buffers: list[memoryview]) -> None:
        text = self._first(buffers)
        self._sending_bytes = len(text)
        record = self._outgoing[: _LENGTH.size + len(text) + _TAG_BYTES]
        record[: _LENGTH.size] = length = _LENGTH.pack(len(text))
        self._seal.encrypt_into(_NONCE.pack(self._num_sealed), text, length, record[_LENGTH.size :])
        self._num_sealed += 1
        self._unsent = record

    def _first(self, buffers: list[memoryview]) -> memoryview:
        """What the next record holds: of the first buffer as much as fits, or as many whole buffers as fit.

        A buffer that is cut would have all those behind it cut, too, and the receiver could open none of them in place.
        """
        size, count = 0, 0
        while count < len(buffers) and size + len(buffers[count]) <= RECORD_BYTES:
            size += len(buffers[count])
            count += 1
        if count <= 1:
            return buffers[0][:RECORD_BYTES]
        if not self._gathered:
            self._gathered = memoryview(bytearray(RECORD_BYTES))
        end = 0
        for buffer in buffers[:count]:
            self._gathered[end : end + len(buffer)] = buffer
            end += len(buffer)
        return self._gathered[:end]

    # Receiving

    def receive_some(self, buffers: list[memoryview]) -> list[memoryview]:
        """Fills buffers in order; returns what is left to fill, which may be all: records are opened as a whole.

        Raises EOFError if the peer has closed the connection, TransferError for a record that the peer has not sealed,
        or not for this place.
        """
        if not self._unread:
            length = self._receive_record()
            if not length:
                return buffers
            record = self._incoming[: _LENGTH.size + length + _TAG_BYTES]
            self._num_received = 0
            if length <= len(buffers[0]):
                self._open_record(record, buffers[0][:length])
                return without(buffers, length)
            if not self._opened:
                self._opened = memoryview(bytearray(RECORD_BYTES))
            self._open_record(record, self._opened[:length])
            self._unread = self._opened[:length]
        for nth, buffer in enumerate(buffers):
            part = self._unread[: len(buffer)]
            buffer[: len(part)] = part
            self._unread = self._unread[len(part) :]
            if not self._unread:
                return [each for each in (buffer[len(part) :], *buffers[nth + 1 :]) if each]
        return []

    def _receive_record(self) -> int:
        """Receives more of a record; its plaintext's length once all of it is there, else 0."""
        if self._num_received < _LENGTH.size:
            self._receive(_LENGTH.size)
            if self._num_received < _LENGTH.size:
                return 0
        (length,) = _LENGTH.unpack(self._incoming[: _LENGTH.size])
        if not 1 <= length <= RECORD_BYTES:
            raise TransferError(f"a record of {length} bytes: {_STRANGER}")
        end = _LENGTH.size + length + _TAG_BYTES
        self._receive(end)
        return int(length) if self._num_received == end else 0

    def _receive(self, end: int) -> None:
        received = self._plain.recv_into(self._incoming[self._num_received : end], 0, socket.MSG_WAITALL)
        if not received:
            raise EOFError("the peer has closed the connection")
        self._num_received += received

    def _open_record(self, record: memoryview, text: memoryview) -> None:
        nonce = _NONCE.pack(self._num_opened)
        self._num_opened += 1
        try:
            self._open.decrypt_into(nonce, record[_LENGTH.size :], record[: _LENGTH.size], text)
        except InvalidTag:
            raise TransferError(f"a record was changed on its way, or {_STRANGER}") from None

    # As of the socket

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        """Bytes as they are on the wire: to see whether any are there, or to discard them."""
        return self._plain.recv(nbytes, flags)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self._plain.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        self._plain.shutdown(how)

    def close(self) -> None:
        self._plain.close()


def without(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The buffers without their first `nbytes`."""
    for nth, buffer in enumerate(buffers):
        if nbytes < len(buffer):
            return [buffer[nbytes:], *buffers[nth + 1 :]]
        nbytes -= len(buffer)
    return []
