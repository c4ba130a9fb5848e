"""The server's side of Mooncake's client: a child process (`worker.py`), and objects in memory shared with it.

All calls block, and end with an answer or with StoreError: the process has died, or was killed because it hangs or
sends what is no answer. A StoreProcess that has failed stays dead; Store starts another.

An object is a block's bytes and a footer. Mooncake may give memory to another object while a reader reads it; the
reader then gets that object's bytes, with checksums that match. So the footer says which object the bytes belong to.

Layout of a footer, little-endian: magic (8 bytes), SHA-256 of the key (32), bytes of the block (8), number of chunks
(8), then the xxh3-64 of each chunk (8 each), then, where servers share a secret, the block's tag (`block_mac.py`).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
import numpy.typing as npt
import structlog

from kvpool.protocol.text import printable
from kvpool.transport.child_process import ChildProcess
from kvpool.transport.segment import sealed_file
from kvpool_server.tiers.block_mac import TAG_BYTES, BlockMac
from kvpool_server.tiers.mooncake import worker
from kvpool_server.tiers.mooncake.worker import Call, MessageError, MessageSocket, Request, StoreConfig
from kvpool_server.tiers.tier import Block, BlockKey, is_sound

log = structlog.get_logger()

WORKER_MODULE = "kvpool_server.tiers.mooncake.worker"
STAGING_BYTES = 64 << 20
"""Staging memory of each channel for transfers. Over TCP unused pages take no memory; RDMA pins all of it."""
NUM_QUESTION_CHANNELS = 2
"""Channels without staging memory: a question to the master waits for no transfer."""
START_S = 9.0
ANSWER_S = 90.0
"""Mooncake gives a transfer up after 60 s at most; a process that answers no transfer for longer hangs."""
LOOK_S = 1.0
"""How often a call without an answer looks whether the process hangs."""
END_S = 3.0
"""Leaving a master that answers takes 2 s."""
TOO_SMALL = -600
"""Mooncake's code: the object is larger than the buffer."""
MAGIC = b"kvpool\x00\x01"
_HEAD = struct.Struct("<8s32sQQ")


class StoreError(Exception):
    """The process has not started, has died, or does not answer as it should; the message says which."""


class StoreChannel(MessageSocket):
    """One connection to the process, for one call at a time. `memory` stages a call's blocks: uint8 [nbytes]."""

    def __init__(self, store: StoreProcess, end: socket.socket, memory: npt.NDArray[np.uint8], offset: int):
        super().__init__(end)
        self.memory = memory
        self._store = store
        self._offset = offset

    def call(self, what: Call, keys: Sequence[str], size: int = 0) -> list[int]:
        """Mooncake's code for each key; `size`: bytes of each object in `memory`, one after the other.

        Raises StoreError.
        """
        sent_at = time.monotonic()
        try:
            self.send(Request(what, list(keys), self._offset, size))
            while (codes := self.receive(worker.CODES, LOOK_S)) is None:
                self._store.check_alive(sent_at)
            if len(codes) != len(keys):
                raise MessageError(f"{len(codes)} codes for {len(keys)} keys")
        except (EOFError, OSError):
            self._store.kill()
            raise StoreError("Mooncake's client process has died") from None
        except MessageError as error:
            self._store.kill()
            raise StoreError(f"Mooncake's client process has sent {error}, and was killed") from None
        if what in worker.TRANSFERS:
            self._store.answered_at = time.monotonic()
        return codes


Channels = queue.SimpleQueue[StoreChannel]
"""Channels that no caller has."""


class StoreProcess:
    """Starts the process, and waits START_S at most until the process has found the master. Raises StoreError.

    Attributes:
        transfers, questions: channels with and without staging memory.
        answered_at: when the process last answered a transfer, monotonic seconds. Transfers wait for their turn, so
            that one of them may take longer than ANSWER_S.
    """

    def __init__(self, config: StoreConfig, num_transfers: int):
        self.answered_at = 0.0
        self._is_dead = False
        ends = [worker.socket_pair() for _ in range(num_transfers + NUM_QUESTION_CHANNELS)]
        # Sealed: the process cannot shorten it, which would end this server with a bus error.
        memory_fd = sealed_file("kvpool-tier-mooncake", num_transfers * STAGING_BYTES)
        try:
            memory = np.frombuffer(mmap.mmap(memory_fd, 0), np.uint8)
            theirs = [end.fileno() for _, end in ends]
            settings = asdict(replace(config, memory_fd=memory_fd, channel_fds=theirs))
            self._process = ChildProcess(WORKER_MODULE, settings, [memory_fd, *theirs])
        finally:
            os.close(memory_fd)
            for _, end in ends:
                end.close()
        starts = range(0, len(ends) * STAGING_BYTES, STAGING_BYTES)
        self._channels = [
            StoreChannel(self, end, memory[start : start + STAGING_BYTES], start)
            for start, (end, _) in zip(starts, ends, strict=True)
        ]
        self.transfers: Channels = queue.SimpleQueue()
        self.questions: Channels = queue.SimpleQueue()
        for nth, channel in enumerate(self._channels):
            (self.transfers if nth < num_transfers else self.questions).put(channel)
        try:
            self._wait_until_ready(config.master)
        except BaseException:
            self.kill()
            self.end()
            raise

    def _wait_until_ready(self, master: str) -> None:
        try:
            problem = self._channels[0].receive(worker.TEXT, START_S)
        except (EOFError, OSError):
            raise StoreError("Mooncake's client process died at its start; its log is on stderr") from None
        except MessageError as error:
            raise StoreError(f"Mooncake's client process has sent {error} at its start") from None
        if problem is None:
            raise StoreError(f"no mooncake_master answers at {master} within {START_S:.0f} s")
        if problem:
            raise StoreError(printable(problem))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._is_dead and self._process.poll() is None

    def check_alive(self, sent_at: float) -> None:
        """For a call sent at `sent_at`, without an answer yet: kills a process that hangs, and raises StoreError."""
        if time.monotonic() - max(sent_at, self.answered_at) > ANSWER_S:
            self.kill()
            raise StoreError(f"Mooncake's client process did not answer within {ANSWER_S:.0f} s, and was killed")

    def kill(self) -> None:
        """Kills the process: every caller that waits for an answer gets StoreError. From any thread. Idempotent."""
        self._is_dead = True
        self._process.kill()

    def end(self) -> None:
        """Lets the process leave the cluster, END_S at most. Idempotent."""
        self._is_dead = True
        self._process.end(END_S)
        for channel in self._channels:
            channel.close()


class Store:
    """The process that makes a tier's calls, started again when it has died or hangs. Thread-safe."""

    def __init__(self, config: StoreConfig, num_transfers: int):
        self._config = config
        self._num_transfers = num_transfers
        self._lock = threading.Lock()
        self._process: StoreProcess | None = None
        self._is_closed = False

    def start(self) -> StoreProcess:
        """The process, started if it does not run. Raises StoreError."""
        with self._lock:
            if self._process is not None:
                if self._process.is_alive:
                    return self._process
                if not self._is_closed:
                    log.error("Mooncake's client process has died and is started again", master=self._config.master)
                self._process.end()
            if not self._is_closed:
                try:
                    self._process = StoreProcess(self._config, self._num_transfers)
                except OSError as error:
                    raise StoreError(str(error)) from None
            if self._process is None or self._is_closed:
                raise StoreError("the tier is closed")
            return self._process

    def transfer(self, move: Callable[[StoreChannel], list[int]]) -> list[int]:
        """Has a channel with staging memory move bytes, again if the process dies meanwhile. Raises StoreError."""
        return self._with_channel(lambda process: process.transfers, move)

    def ask(self, what: Call, keys: Sequence[str]) -> list[int]:
        """Mooncake's code for each key of a call that moves no bytes. Raises StoreError."""
        return self._with_channel(lambda process: process.questions, lambda channel: channel.call(what, keys))

    def close(self) -> None:
        """Lets the process leave the cluster, END_S at most; calls under way get StoreError. Idempotent."""
        self._is_closed = True
        with self._lock:  # A process that starts meanwhile is ended, too.
            if self._process is not None:
                self._process.end()

    def _with_channel(
        self, channels_of: Callable[[StoreProcess], Channels], work: Callable[[StoreChannel], list[int]]
    ) -> list[int]:
        for is_last in (False, True):
            channels = channels_of(self.start())
            channel = channels.get()
            try:
                return work(channel)
            except StoreError:
                if is_last or self._is_closed:
                    raise
            finally:
                channels.put(channel)
        raise AssertionError("the last try returns or raises")


def object_key(block: BlockKey) -> str:
    """The key of a block's object: `kvpool/<fingerprint>/<group_idx>/<block hash>`, in hex."""
    fingerprint, group_idx, block_hash = block
    return f"kvpool/{fingerprint.hex()}/{group_idx}/{block_hash.hex()}"


def footer_bytes(num_shards: int, has_tag: bool = False) -> int:
    """Length of a footer."""
    return _HEAD.size + 8 * num_shards + TAG_BYTES * has_tag


def encode_footer(key: str, slot_bytes: int, checksums: Sequence[int], tag: bytes = b"") -> bytes:
    """The footer of a block."""
    head = _HEAD.pack(MAGIC, _digest(key), slot_bytes, len(checksums))
    return head + struct.pack(f"<{len(checksums)}Q", *checksums) + tag


def verify(
    key: str, payload: memoryview, num_shards: int, footer: bytes, name: BlockKey, mac: BlockMac | None
) -> Sequence[int] | None:
    """Checksums of the block's chunks, if all of `payload` is what was stored as `key`; else None.

    Args:
        payload: uint8 [slot_bytes].
        footer: `footer_bytes(num_shards, mac is not None)` bytes.
    """
    if _HEAD.unpack_from(footer) != (MAGIC, _digest(key), payload.nbytes, num_shards):
        return None
    checksums: Sequence[int] = struct.unpack_from(f"<{num_shards}Q", footer, _HEAD.size)
    if mac is not None and not mac.is_valid(name, payload, footer[footer_bytes(num_shards) :]):
        return None
    return checksums if is_sound(payload, checksums) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def put_blocks(
    names: Sequence[BlockKey], blocks: Sequence[Block], mac: BlockMac | None, channel: StoreChannel
) -> list[int]:
    """Copies blocks to the staging memory, and puts them; Mooncake's codes. Raises StoreError."""
    keys = list(map(object_key, names))
    nbytes = blocks[0].payload.nbytes
    size = nbytes + footer_bytes(len(blocks[0].checksums), mac is not None)
    for nth, (key, name, block) in enumerate(zip(keys, names, blocks, strict=True)):
        staged = channel.memory[nth * size : (nth + 1) * size]
        staged[:nbytes] = np.frombuffer(block.payload, np.uint8)
        tag = b"" if mac is None else mac.tag(name, block.payload)
        staged[nbytes:] = np.frombuffer(encode_footer(key, nbytes, block.checksums, tag), np.uint8)
    return channel.call("put", keys, size)


class StagedRead:
    """One read of several objects. The loop creates and cancels it; a thread of the tier copies.

    Args:
        views: where each block of `names` goes: uint8 [slot_bytes], `num_shards` chunks.

    Attributes:
        found: for each block the checksums of its chunks, None until the block has been copied and verified.
        corrupt: keys of objects that are not what was stored.
    """

    def __init__(self, names: Sequence[BlockKey], views: Sequence[memoryview], num_shards: int, mac: BlockMac | None):
        self.found: list[Sequence[int] | None] = [None] * len(names)
        self.corrupt: list[str] = []
        self._keys = list(map(object_key, names))
        self._names = names
        self._views = views
        self._num_shards = num_shards
        self._mac = mac
        self._lock = threading.Lock()
        self._is_cancelled = False

    def run(self, channel: StoreChannel) -> list[int]:
        """Gets the objects, and copies and verifies each; Mooncake's codes. Raises StoreError."""
        size = self._views[0].nbytes + footer_bytes(self._num_shards, self._mac is not None)
        codes = channel.call("get", self._keys, size)
        for nth, code in enumerate(codes):
            if code == size:
                self._copy(nth, channel.memory[nth * size : (nth + 1) * size])
            elif code >= 0 or code == TOO_SMALL:
                self.corrupt.append(self._keys[nth])
        return codes

    def _copy(self, nth: int, staged: npt.NDArray[np.uint8]) -> None:
        """Copies one object, then verifies the copy: the staging memory may still change."""
        view = self._views[nth]
        with self._lock:
            if self._is_cancelled:
                return
            np.frombuffer(view, np.uint8)[:] = staged[: view.nbytes]
            footer = staged[view.nbytes :].tobytes()
            self.found[nth] = verify(self._keys[nth], view, self._num_shards, footer, self._names[nth], self._mac)
        if self.found[nth] is None:
            self.corrupt.append(self._keys[nth])

    def cancel(self) -> None:
        """No view is written from now on. Idempotent."""
        with self._lock:
            self._is_cancelled = True
