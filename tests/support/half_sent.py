"""Calls of which a client sends only a part: an HTTP/2 peer without a library, so that nothing completes a message.

Source: RFC 9113 (HTTP/2), RFC 7541 (HPACK; only literals without Huffman codes).
"""

from __future__ import annotations

import socket
import struct
import threading

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_HEADERS = 1, 4
_FRAME = 16_384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2, as sent."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _headers(path: str) -> bytes:
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "kvpool"), ("te", "trailers")]
    fields += [("content-type", "application/grpc"), ("grpc-timeout", "500S")]
    return b"".join(
        bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode() for name, value in fields
    )


class HalfSentCalls:
    """One connection with calls that never end.

    Attributes:
        ended: streams that the server has ended.
        pongs, farewells: answers to pings, and the server's announcements of the connection's end, so far.
        sent_bytes: of messages, so far.
    """

    def __init__(self, endpoint: str):
        host, _, port = endpoint.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        self._lock = threading.Condition()
        self._windows = {0: 65_535}
        self._first_window = 65_535
        self._next_stream = 1
        self.ended: set[int] = set()
        self.sent_bytes = self.pongs = self.farewells = 0
        self._socket.sendall(PREFACE + frame(_SETTINGS, 0, 0))
        self._socket.settimeout(None)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def begin(self, method: str, declared_bytes: int = 0, sent_bytes: int = 0, timeout_s: float = 5.0) -> int:
        """Begins a call, and sends part of a message; returns its stream.

        Sends as much as the server lets it within `timeout_s`.

        Args:
            method: of the Pool service, or /SERVICE/METHOD.
        """
        path = method if method.startswith("/") else f"/kvpool.v1.Pool/{method}"
        with self._lock:
            stream, self._next_stream = self._next_stream, self._next_stream + 2
            self._windows[stream] = self._first_window
            self._send(frame(_HEADERS, _END_HEADERS, stream, _headers(path)))
        if declared_bytes:
            self._send_data(stream, b"\0" + struct.pack(">I", declared_bytes), timeout_s)
            while sent_bytes > 0 and stream not in self.ended:
                size = min(sent_bytes, _FRAME)
                if not self._send_data(stream, bytes(size), timeout_s):
                    break
                sent_bytes -= size
        return stream

    def reset(self, method: str, count: int) -> None:
        """Begins calls, and resets each at once."""
        headers, code = _headers(f"/kvpool.v1.Pool/{method}"), struct.pack(">I", 8)  # CANCEL
        with self._lock:
            streams = range(self._next_stream, self._next_stream + 2 * count, 2)
            self._next_stream = streams.stop
            frames = (frame(_HEADERS, _END_HEADERS, each, headers) + frame(_RST, 0, each, code) for each in streams)
            self._send(b"".join(frames))

    def ping(self, count: int) -> None:
        """Sends pings, none of which awaits the answer to another."""
        self._send(count * frame(_PING, 0, 0, bytes(8)))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(10)
        self._socket.close()

    def _send(self, frame: bytes) -> None:
        self._socket.sendall(frame)

    def _send_data(self, stream: int, payload: bytes, timeout_s: float) -> bool:
        def may_send() -> bool:
            return stream in self.ended or min(self._windows[0], self._windows[stream]) >= len(payload)

        with self._lock:
            if not self._lock.wait_for(may_send, timeout_s) or stream in self.ended:
                return False
            self._windows[0] -= len(payload)
            self._windows[stream] -= len(payload)
            self._send(frame(_DATA, 0, stream, payload))
            self.sent_bytes += len(payload)
        return True

    def _read(self) -> None:
        try:
            while head := self._receive(9):
                size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                stream, payload = int.from_bytes(head[5:], "big") & 0x7FFFFFFF, self._receive(size)
                with self._lock:
                    self._handle(kind, flags, stream, payload)
                    self._lock.notify_all()
        except OSError:
            pass

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at : at + 6])
                if name == 4:
                    for open_stream in self._windows.keys() - {0}:
                        self._windows[open_stream] += value - self._first_window
                    self._first_window = value
            self._send(frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and flags & _ACK:
            self.pongs += 1
        elif kind == _PING:
            self._send(frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, 0) + int.from_bytes(payload, "big")
        elif kind == _RST or (kind == _HEADERS and flags & 1):
            self.ended.add(stream)
        elif kind == _GOAWAY:
            self.farewells += 1
            self.ended.update(self._windows)

    def _receive(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            part = self._socket.recv(size - len(received))
            if not part:
                raise ConnectionError
            received += part
        return received
