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
import time
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvpool.errors import TransferError

RECORD_BYTES = 1 << 20
RANDOM_BYTES = 16
CHANNEL_ID_BYTES = 16
_KEY_BYTES, _TAG_BYTES = 32, 16
_LENGTH = struct.Struct("<I")
_NONCE = struct.Struct("<4xQ")
_TIMEVAL = struct.Struct("ll")
_INFO = b"kvpool data port"


class SealedSocket:
    """The parts of a socket that `kvpool.data_port` uses, over a connected socket. One thread.

    A call that times out in the middle of a record ends the connection's use, as it does in the middle of a payload.

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
        self._outgoing = bytearray(_LENGTH.size + RECORD_BYTES + _TAG_BYTES)
        self._gathered = bytearray(0)
        self._incoming = bytearray(RECORD_BYTES + _TAG_BYTES)
        self._opened = bytearray(0)
        self._unread = memoryview(b"")
        self._wait_s: dict[int, float | None] = {socket.SO_RCVTIMEO: None, socket.SO_SNDTIMEO: None}

    # What times out

    def settimeout(self, seconds: float | None) -> None:
        self._plain.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """As of the socket; a timeout also bounds a record as a whole."""
        self._plain.setsockopt(level, option, value)
        if level == socket.SOL_SOCKET and option in self._wait_s and isinstance(value, bytes):
            seconds, microseconds = _TIMEVAL.unpack(value)
            self._wait_s[option] = seconds + microseconds / 1e6

    def _wait(self, option: int, deadline: float | None) -> None:
        """Bounds the next wait by a record's deadline. Raises BlockingIOError, as the kernel does, if it has passed."""
        if deadline is None:
            return
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise BlockingIOError
        microseconds = max(1_000, int(remaining_s * 1e6))
        self._plain.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(microseconds, 1_000_000)))

    def _deadline(self, option: int) -> float | None:
        wait_s = self._wait_s[option]
        return None if wait_s is None else time.monotonic() + wait_s

    # Sending

    def send(self, view: memoryview) -> int:
        return self.sendmsg([view])

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self.send(view) :]

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Sends one record of the first bytes of the buffers, all of it; returns how many bytes of theirs it holds."""
        first = buffers[0]
        is_enough = len(buffers) == 1 or len(first) >= RECORD_BYTES
        text = first[:RECORD_BYTES] if is_enough else self._gather(buffers)
        length = _LENGTH.pack(len(text))
        end = _LENGTH.size + len(text) + _TAG_BYTES
        record = memoryview(self._outgoing)[:end]
        record[: _LENGTH.size] = length
        nonce = _NONCE.pack(self._num_sealed)
        self._num_sealed += 1
        self._seal.encrypt_into(nonce, text, length, record[_LENGTH.size :])
        deadline = self._deadline(socket.SO_SNDTIMEO)
        sent = self._plain.send(record)
        while sent < end:
            self._wait(socket.SO_SNDTIMEO, deadline)
            sent += self._plain.send(record[sent:])
        return len(text)

    def _gather(self, buffers: Sequence[memoryview]) -> memoryview:
        """The first `RECORD_BYTES` of the buffers, one after the other."""
        if not self._gathered:
            self._gathered = bytearray(RECORD_BYTES)
        end = 0
        for buffer in buffers:
            part = buffer[: RECORD_BYTES - end]
            self._gathered[end : end + len(part)] = part
            end += len(part)
            if end == RECORD_BYTES:
                break
        return memoryview(self._gathered)[:end]

    # Receiving

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        """As of the socket; flags peek at the records as they are, for who asks whether any bytes are there."""
        if flags:
            return self._plain.recv(nbytes, flags)
        received = bytearray(nbytes)
        return bytes(received[: self.recvmsg_into([memoryview(received)])[0]])

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        return self.recvmsg_into([view])[0]

    def recvmsg_into(self, buffers: Sequence[memoryview], ancillary_bytes: int = 0, flags: int = 0) -> tuple[int]:
        """Fills buffers in order with what is left of the last record, else with the next one.

        Returns the number of bytes as a tuple; 0 if the peer has closed the connection between two records. Raises
        TransferError for a record that the peer has not sealed, or not for this place.
        """
        if not self._unread:
            length = self._receive_length()
            if not length:
                return (0,)
            if length <= len(buffers[0]):
                self._receive_record(length, buffers[0][:length])
                return (length,)
            if not self._opened:
                self._opened = bytearray(RECORD_BYTES)
            self._unread = memoryview(self._opened)[:length]
            try:
                self._receive_record(length, self._unread)
            except BaseException:
                self._unread = memoryview(b"")
                raise
        filled = 0
        for buffer in buffers:
            part = self._unread[: len(buffer)]
            buffer[: len(part)] = part
            self._unread = self._unread[len(part) :]
            filled += len(part)
            if not self._unread:
                break
        return (filled,)

    def _receive_length(self) -> int:
        """The plaintext's length of the next record; 0 at the end."""
        packed = memoryview(bytearray(_LENGTH.size))
        received = self._plain.recv_into(packed, 0, socket.MSG_WAITALL)
        if not received:
            return 0
        if received < len(packed):
            self._fill(packed[received:], self._deadline(socket.SO_RCVTIMEO))
        (length,) = _LENGTH.unpack(packed)
        if not 1 <= length <= RECORD_BYTES:
            raise TransferError(f"a record of {length} bytes: the peer does not share this connection's secret")
        return int(length)

    def _receive_record(self, length: int, text: memoryview) -> None:
        """Receives and opens a record whose length has been received."""
        record = memoryview(self._incoming)[: length + _TAG_BYTES]
        self._fill(record, self._deadline(socket.SO_RCVTIMEO))
        nonce = _NONCE.pack(self._num_opened)
        self._num_opened += 1
        try:
            self._open.decrypt_into(nonce, record, _LENGTH.pack(length), text)
        except InvalidTag:
            raise TransferError(
                "a record was changed on its way, or the peer does not share this connection's secret"
            ) from None

    def _fill(self, view: memoryview, deadline: float | None) -> None:
        while True:
            received = self._plain.recv_into(view, 0, socket.MSG_WAITALL)
            if not received:
                raise EOFError("the peer has closed the connection in the middle of a record")
            view = view[received:]
            if not view:
                return
            self._wait(socket.SO_RCVTIMEO, deadline)

    # The rest

    def shutdown(self, how: int) -> None:
        self._plain.shutdown(how)

    def close(self) -> None:
        self._plain.close()

    def fileno(self) -> int:
        return self._plain.fileno()
