"""How an engine's blocks are named in the pool: by vLLM's block hash, and by the content of the request's LoRA adapter.

vLLM's block hashes name an adapter by its name and path alone.

An adapter's blocks are shared only where the engine's ranks must have loaded the bytes that this module has read. vLLM
loads an adapter some time after a request names it, and may drop it and load it again without notice. So the adapter's
files must be unchanged since before the engine started, and stay unchanged; otherwise requests with that adapter are
computed. A thread reads and watches the files: the scheduler's thread touches no disk.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger

from kvpool.protocol.types import HASH_BYTES, BlockRun
from vllm_plugin.model.weights import adapter_directory, asks_the_hub, content_digest, states

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    from vllm_plugin.model.kinds import Kind

logger = init_logger("vllm.kvpool.adapters")

MAX_ADAPTERS = 4096
READ_WITHIN_S = 2.0
"""A request waits at most this long until its adapter's files have been checked."""
CLOCK_STEP_S = 1.0
"""Resolution of file times: a file must be older than the engine by this much to count as older."""
NO_ADAPTER = bytes(HASH_BYTES)


class BlockNames:
    """Names an engine's blocks. Its answers about adapters change between steps only.

    Args:
        hash_tokens: tokens that one of vLLM's block hashes covers.
        share: "unchanged", "always" or "never"; see `ConnectorConfig.share_adapters`.
    """

    def __init__(self, hash_tokens: int, vllm_config: VllmConfig, share: str):
        self.hash_tokens = hash_tokens
        self._waiting_since: dict[str, float] = {}  # Request -> first question since it last had blocks, `time.time`.
        self._share = share
        self._started_at = time.time()
        self._reason = _why_not(vllm_config) if share == "unchanged" else ""
        self._lock = threading.Lock()
        self._found: dict[tuple[str, str], bytes | None] = {}  # What the thread has found since the last step.
        self._digests: dict[tuple[str, str], bytes | None] = {}
        self._checked: dict[tuple[str, str], float] = {}  # By the thread, since the last step.
        self._checked_at: dict[tuple[str, str], float] = {}
        self._check_since: dict[tuple[str, str], float] = {}
        self._key_of_id: dict[int, tuple[str, str]] = {}
        self._refused: set[tuple[str, str]] = set()
        self._asked_at: dict[tuple[str, str], float] = {}
        self._new: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._said = False

    def new_step(self) -> None:
        """Publishes what the thread has found: answers change between steps only."""
        if not self._found and not self._checked:
            return
        with self._lock:
            found, self._found = self._found, {}
            checked, self._checked = self._checked, {}
        for key, digest in found.items():
            if digest is None or key not in self._digests:
                self._digests[key] = digest
        self._checked_at.update(checked)
        for key in checked:
            self._check_since.pop(key, None)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._new.put(None)

    # A request

    def are_known(self, request: Request) -> bool:
        """Whether a request's blocks can be shared: it has no adapter, or one whose content is known."""
        return self._digest(request) is not None

    def adapter(self, request: Request) -> bytes:
        """The digest of a request's adapter, which must be known."""
        digest = self._digest(request)
        assert digest is not None, "the digest of the request's LoRA adapter is not known"
        return digest

    def _digest(self, request: Request) -> bytes | None:
        """What names a request's adapter, `HASH_BYTES` long; None if its blocks must not be shared (yet)."""
        if (lora := request.lora_request) is None:
            return NO_ADAPTER
        if self._share == "never":
            return None
        if self._reason:
            if not self._said:
                logger.warning(
                    "kvpool shares no KV blocks of LoRA adapters: %s; "
                    "see share_adapters in docs/reference/configuration.md",
                    self._reason,
                )
            self._said = True
            return None
        key = _key(lora)
        known = self._key_of_id.setdefault(lora.lora_int_id, key)
        if known != key or (lora.load_inplace and self._share != "always"):
            # Ranks tell adapters apart by this number alone.
            for each in {known, key}:
                self._refuse(each, "another adapter was loaded under its lora_int_id, or it was loaded again in place")
            self.new_step()
        if key not in self._asked_at and len(self._asked_at) < MAX_ADAPTERS:
            self._asked_at[key] = time.monotonic()
            self._new.put(key)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="kvpool-adapters", daemon=True)
                self._thread.start()
        return self._digests.get(key)

    def are_current(self, request: Request) -> bool:
        """Whether a request's blocks can be shared, and its adapter was checked since it first asked to be admitted.

        While it did not run, ranks may have dropped its adapter, and load what the files hold now.
        """
        if request.lora_request is None:
            return True
        since = self._waiting_since.setdefault(request.request_id, time.time())
        return self.are_known(request) and self.are_checked(request, since)

    def are_coming(self, request: Request) -> bool:
        """Whether blocks that are not current will soon be, within `READ_WITHIN_S`: the thread reads the files."""
        if request.lora_request is None or self._share == "never" or self._reason:
            return False
        key = _key(request.lora_request)
        if self._digests.get(key, NO_ADAPTER) is None:
            return False
        began_at = self._check_since.get(key, self._asked_at.get(key, 0.0))
        return time.monotonic() - began_at < READ_WITHIN_S

    def are_checked(self, request: Request, since: float) -> bool:
        """Whether a request's adapter was checked after `since` (`time.time`); if not, has the thread check it."""
        if request.lora_request is None or self._share == "always":
            return True
        key = _key(request.lora_request)
        if self._checked_at.get(key, 0.0) >= since:
            return True
        if key not in self._check_since:
            self._check_since[key] = time.monotonic()
            self._new.put(key)
        return False

    def admitted(self, request_id: str) -> None:
        """A request was given blocks, or has ended."""
        self._waiting_since.pop(request_id, None)

    def run(self, request: Request, group_idx: int, kind: Kind, first: int, stop: int) -> BlockRun:
        """Blocks [first, stop) of a request. A block of several hash units is named by the last of them."""
        ratio = kind.block_tokens // self.hash_tokens
        hashes, adapter = request.block_hashes, self.adapter(request)
        units: Sequence[bytes]
        if ratio > 1:
            units = [hashes[(idx + 1) * ratio - 1] for idx in range(first, stop)]
        else:  # Of a streaming session vLLM cuts the hashes again.
            units = hashes[first:stop] if request.resumable else HashRange(hashes, first, stop)
        parent = [hashes[first * ratio - 1]] if first else []
        return BlockRun(group_idx, named(units, adapter), *named(parent, adapter))

    # The thread

    def _watch(self) -> None:
        """Reads each new adapter, and checks it for changes, of which its files' times tell, whenever that is asked."""
        states: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
        while (key := self._new.get()) is not None:
            try:
                if key not in states:
                    states[key] = self._read(key)
                self._check(key, states[key])
            except Exception as error:  # Whatever it is: this thread has other adapters to watch.
                states[key] = []
                self._refuse(key, f"its files cannot be read: {error}")

    def _check(self, key: tuple[str, str], before: list[tuple[str, int, int]]) -> None:
        began_at = time.time()
        try:
            is_unchanged = _state(adapter_directory(key[1])) == before
        except OSError:
            is_unchanged = False
        if not is_unchanged:
            self._refuse(key, "its files have changed since the engine started")
        with self._lock:
            self._checked[key] = began_at

    def _read(self, key: tuple[str, str]) -> list[tuple[str, int, int]]:
        place = adapter_directory(key[1])
        before = _state(place)
        newest_s = max((ctime_ns for _, ctime_ns, _ in before), default=0) / 1e9
        digest = bytes.fromhex(content_digest(place))
        if self._share == "unchanged" and asks_the_hub(key[1]):
            why = "its ranks may load another commit of it from the hub; name a directory, or set HF_HUB_OFFLINE=1"
            self._refuse(key, why)
        elif _state(place) != before:
            self._refuse(key, "its files changed while they were read")
        elif self._share == "unchanged" and newest_s > self._started_at - CLOCK_STEP_S:
            self._refuse(key, "its files are newer than the engine: what its ranks have loaded may differ")
        else:
            with self._lock:
                self._found.setdefault(key, digest)
        return before

    def _refuse(self, key: tuple[str, str], why: str) -> None:
        with self._lock:
            if key in self._refused:
                return
            self._refused.add(key)
            self._found[key] = None
        logger.warning(
            "kvpool shares no KV blocks of LoRA adapter %r (%s): %s; "
            "see share_adapters in docs/reference/configuration.md",
            *key,
            why,
        )


class HashRange(Sequence[bytes]):
    """Hashes [first, stop) of a request, which are copied where they are used: on threads that send them, mostly.

    A list costs the scheduler's thread a look at each of thousands of hashes when it is made, and in every collection
    of garbage.

    Args:
        hashes: of the request, to which vLLM only appends.
    """

    __slots__ = ("_first", "_hashes", "_stop")

    def __init__(self, hashes: Sequence[bytes], first: int, stop: int):
        self._hashes, self._first, self._stop = hashes, first, stop

    def __len__(self) -> int:
        return self._stop - self._first

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._hashes[self._first : self._stop])

    def __getitem__(self, at: Any) -> Any:
        here = range(self._first, self._stop)[at]
        if isinstance(here, int):
            return self._hashes[here]
        if here.step == 1:
            return HashRange(self._hashes, here.start, here.stop)
        return [self._hashes[nth] for nth in here]


def named(block_hashes: Sequence[bytes], digest: bytes) -> Sequence[bytes]:
    """Names in the pool of blocks that an adapter computed: their hashes XOR its digest.

    Both are SHA-256: two pairs collide as rarely as two hashes do. Naming twice gives the hashes back.
    """
    if digest == NO_ADAPTER or not block_hashes:
        return block_hashes
    rows = np.frombuffer(b"".join(block_hashes), np.uint8).reshape(-1, HASH_BYTES)
    names = (rows ^ np.frombuffer(digest, np.uint8)).tobytes()
    return [names[at : at + HASH_BYTES] for at in range(0, len(names), HASH_BYTES)]


def _key(lora: LoRARequest) -> tuple[str, str]:
    return lora.lora_name, lora.lora_path


def _why_not(vllm_config: VllmConfig) -> str:
    """Why the adapters that this engine's ranks have loaded cannot be known; empty if they can."""
    import vllm.envs

    parallel = vllm_config.parallel_config
    if vllm.envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        return "VLLM_ALLOW_RUNTIME_LORA_UPDATING lets adapters be replaced while requests run"
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        return "ranks on other hosts read files of their own"
    return ""


def _state(place: Path) -> list[tuple[str, int, int]]:
    """Changes whenever a file below a directory does, or a link on the way to it."""
    return states([place, *sorted(place.rglob("*"))])
