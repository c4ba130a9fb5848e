"""Blocks on their way from the staging memory to where their reader wants them, unless the reader has left."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from kvpool_server.tiers.block_mac import BlockMac
from kvpool_server.tiers.mooncake.footer import footer_bytes, verify
from kvpool_server.tiers.mooncake.store_process import StoreChannel
from kvpool_server.tiers.tier import BlockKey

TOO_SMALL = -600
"""Mooncake's code: the object is larger than the buffer."""


class StagedRead:
    """One read of several objects. The loop creates and cancels it; a thread of the tier copies.

    Args:
        keys, views, names: of each object its key, where its block goes, and the block's name.
        num_shards: chunks of each block.
        mac: verifies the blocks' tags; None: blocks have none.

    Attributes:
        found: for each key the checksums of the block's chunks, None until the block has been copied and verified.
        corrupt: keys of objects that are not what was stored.
    """

    def __init__(
        self,
        keys: Sequence[str],
        views: Sequence[memoryview],
        num_shards: int,
        names: Sequence[BlockKey],
        mac: BlockMac | None,
    ):
        self.keys = keys
        self._names = names
        self._mac = mac
        self.views = views
        self.object_bytes = views[0].nbytes + footer_bytes(num_shards, mac is not None)
        self.found: list[Sequence[int] | None] = [None] * len(keys)
        self.corrupt: list[str] = []
        self._num_shards = num_shards
        self._lock = threading.Lock()
        self._is_cancelled = False

    def run(self, channel: StoreChannel) -> list[int]:
        """Gets the objects, and copies and verifies each; Mooncake's codes. Raises StoreError."""
        size = self.object_bytes
        offsets = [nth * size for nth in range(len(self.keys))]
        codes = channel.call("get", self.keys, offsets, [size] * len(self.keys))
        for nth, code in enumerate(codes):
            if code == size:
                self._copy(nth, channel.memory[offsets[nth] : offsets[nth] + size])
            elif code >= 0 or code == TOO_SMALL:
                self.corrupt.append(self.keys[nth])
        return codes

    def _copy(self, nth: int, staged: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Copies one object, then verifies the copy: the staging memory may still change."""
        view = self.views[nth]
        with self._lock:
            if self._is_cancelled:
                return
            np.frombuffer(view, np.uint8)[:] = staged[: view.nbytes]
            footer = staged[view.nbytes :].tobytes()
            self.found[nth] = verify(self.keys[nth], view, self._num_shards, footer, self._names[nth], self._mac)
        if self.found[nth] is None:
            self.corrupt.append(self.keys[nth])

    def cancel(self) -> None:
        """No view is written from now on. Idempotent."""
        with self._lock:
            self._is_cancelled = True
