"""Hints of requests: what `kv_transfer_params` of a request say of its prompt, told to the pool.

    {"kvpool": {"pin_s": 600, "expire": true, "prefetch": true}}

A request with an unknown key or a bad value is served as if the key were not there; the log names the key. The pool is
told of a pin when the request gets its blocks, after each store of it, and when its last store has ended; of an expiry
when the request and its stores have ended. Nothing waits for a hint, and it can be lost.
"""

from __future__ import annotations

import functools
import itertools
import queue
import reprlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvpool.client.rpc import Namespace
from kvpool.protocol.errors import KVPoolError
from kvpool.protocol.types import BlockRun, HintKind
from vllm_plugin.metadata import StoreJob
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.groups import Geometry
from vllm_plugin.scheduler.stages import Stages
from vllm_plugin.session import Session

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool.hints")

KEY = "kvpool"
"""Of `kv_transfer_params`; other connectors have keys of their own."""
KEYS = ("pin_s", "expire", "prefetch")
MAX_PIN_S = 86_400
MAX_WAITING = 256
"""Hints that wait to be told; further ones are lost."""
TIMEOUT_MS = 5_000
END_S = 1.0
"""How long `Hints.close` lets the waiting hints be told."""
MAX_LOGGED = 16
"""Different complaints that one engine logs, each once."""
MAX_SHOWN = 64
"""Characters of a key or value in a complaint."""
MAX_UNKNOWN = 16
"""Unknown keys of one request that are refused by name; further ones are passed over."""


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What one request says; its prompt is pinned for `pin_s` seconds, or not at all."""

    pin_s: int = 0
    expire: bool = False
    prefetch: bool = False

    def __bool__(self) -> bool:
        return bool(self.pin_s or self.expire or self.prefetch)


def parse(params: object) -> tuple[RequestHints, list[str]]:
    """The hints in a request's `kv_transfer_params`, and a sentence for each key that is refused. Never raises."""
    if not isinstance(params, Mapping) or KEY not in params:
        return RequestHints(), []
    given = params[KEY]
    if not isinstance(given, Mapping):
        return RequestHints(), [f"{KEY} = {_shown(given)} is no object; give one with pin_s, expire or prefetch"]
    values: dict[str, Any] = {}
    refused = []
    for key in KEYS:
        if key not in given:
            continue
        value = given[key]
        if key == "pin_s":
            if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_PIN_S:
                values[key] = value
            else:
                refused.append(f"pin_s = {_shown(value)} is no pin; give 1 to {MAX_PIN_S} seconds")
        elif isinstance(value, bool):
            values[key] = value
        else:
            refused.append(f"{key} = {_shown(value)} is neither true nor false; give one of them")
    for key in itertools.islice((key for key in given if key not in KEYS), MAX_UNKNOWN):
        refused.append(f"unknown key {_shown(key)}; give pin_s, expire or prefetch")
    return RequestHints(**values), refused


_SHORT = reprlib.Repr()  # Cuts long strings and lists before their repr is made.
_SHORT.maxstring = _SHORT.maxlong = MAX_SHOWN


def _shown(value: object) -> str:
    try:
        text = _SHORT.repr(value)
    except Exception:  # E.g. an integer has too many digits.
        text = f"a value of type {type(value).__name__}"
    return text[:MAX_SHOWN].encode("unicode_escape").decode()[:MAX_SHOWN]


@dataclass(slots=True)
class _Hinted:
    """A request with hints, from the first question about it until its last store has ended."""

    request: Request
    hints: RequestHints
    num_storing: int = 0
    is_admitted: bool = False
    has_ended: bool = False


class Hints:
    """Tells the pool the hints of an engine's requests. Called on the scheduler's thread; returns at once.

    A thread, which the first hint starts, tells the hints in order.
    """

    def __init__(self, geometry: Geometry, stages: Stages, recorder: Recorder):
        self._geometry = geometry
        self._stages = stages
        self._recorder = recorder
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_over = False
        self._said = ""
        self._hinted: dict[str, _Hinted] = {}
        self._logged: set[str] = set()

    def asked(self, request: Request) -> None:
        """vLLM asks about a request, maybe again."""
        if not request.kv_transfer_params or request.request_id in self._hinted:
            return
        hints, refused = parse(request.kv_transfer_params)
        if not hints and not refused:
            return
        hinted = self._hinted[request.request_id] = _Hinted(request, hints)
        self._refuse(refused)
        if hints.prefetch:
            self._send(hinted, HintKind.PREFETCH, self._runs(request, request.num_prompt_tokens))

    def admitted(self, request: Request) -> None:
        if (hinted := self._hinted.get(request.request_id)) is not None and not hinted.is_admitted:
            hinted.is_admitted = True
            self._pin(hinted)

    def _of(self, request: Request) -> _Hinted | None:
        """Of this request, not of an earlier one with the same id."""
        hinted = self._hinted.get(request.request_id)
        return hinted if hinted is not None and hinted.request is request else None

    def storing(self, request: Request) -> None:
        if (hinted := self._of(request)) is not None:
            hinted.num_storing += 1

    def stored(self, request: Request, job: StoreJob, succeeded: bool) -> None:
        """A store of a request has ended, or was canceled."""
        if (hinted := self._of(request)) is not None:
            hinted.num_storing -= 1
            if succeeded and hinted.hints.pin_s and not hinted.has_ended:
                self._send(hinted, HintKind.PIN, self._prompt_part(request, job))
            self._end(hinted)

    def finished(self, request: Request) -> None:
        """A request has ended; its last stores are built."""
        if (hinted := self._of(request)) is not None:
            hinted.has_ended = True
            self._end(hinted)

    def close(self) -> None:
        """Lets the waiting hints be told for `END_S`; they are lost at once if the queue is full. Idempotent."""
        was_closed, self._is_closed = self._is_closed, True
        if was_closed or self._thread is None:
            return
        if self._waiting.full():
            self._is_over = True
        else:
            self._waiting.put(None)
        self._thread.join(END_S)
        self._is_over = True  # The thread is a daemon, and ends with its present call.

    def _end(self, hinted: _Hinted) -> None:
        if not hinted.has_ended or hinted.num_storing > 0:
            return
        request = hinted.request
        del self._hinted[request.request_id]
        self._pin(hinted)
        if hinted.hints.expire:
            self._send(hinted, HintKind.EXPIRE, self._runs(request, request.num_tokens))

    def _pin(self, hinted: _Hinted) -> None:
        if hinted.hints.pin_s:
            self._send(hinted, HintKind.PIN, self._runs(hinted.request, hinted.request.num_prompt_tokens))

    def _runs(self, request: Request, num_tokens: int) -> list[BlockRun]:
        """A request's blocks among its first tokens, one run a group."""
        names, runs = self._geometry.names, []
        if not names.are_known(request):
            return []
        num_tokens = min(num_tokens, len(request.block_hashes) * names.hash_tokens)
        for idx, group in enumerate(self._geometry.groups):
            if count := num_tokens // group.kind.block_tokens:
                runs.append(names.run(request, idx, group.kind, 0, count))
        return runs

    def _prompt_part(self, request: Request, job: StoreJob) -> list[BlockRun]:
        """The blocks of a job that are full of prompt tokens."""
        runs = []
        for part in job.groups:
            count = request.num_prompt_tokens // self._geometry.groups[part.group_idx].kind.block_tokens
            for run, first in zip(part.runs, part.firsts, strict=True):
                if first < count:
                    runs.append(BlockRun(run.group_idx, run.block_hashes[: count - first], run.parent_hash))
        return runs

    def _send(self, hinted: _Hinted, kind: HintKind, runs: Sequence[BlockRun]) -> None:
        """Has the pool told in the namespace of each stage; a hint is lost if the pool is away, or too many wait."""
        if not runs:
            return
        pin_s = hinted.hints.pin_s if kind is HintKind.PIN else 0
        for session in self._stages.sessions:
            namespace = session.namespace
            if namespace is None or self._is_closed or self._waiting.full():  # No other thread puts anything.
                self._recorder.add("lost_hints")
                continue
            self._waiting.put(functools.partial(self._tell, session, namespace, kind, runs, pin_s))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvpool-hints", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (tell := self._waiting.get()) is not None and not self._is_over:
            with self._recorder.guard.part("a hint to the pool"):
                tell()

    def _tell(
        self, session: Session, namespace: Namespace, kind: HintKind, runs: Sequence[BlockRun], pin_s: int
    ) -> None:
        rpc = session.client.rpc
        try:
            told = rpc.hint(namespace.fingerprint, rpc.encode_runs(runs), kind, pin_s, TIMEOUT_MS)
        except KVPoolError as error:
            self._recorder.add("lost_hints")
            if self._said != str(error):
                self._said = str(error)
                logger.warning("kvpool: the pool did not take a hint: %s", error)
            return
        if kind is HintKind.PIN:
            self._recorder.add("pinned_hint_blocks", told.num_blocks)
            self._recorder.add("unpinned_hint_blocks", told.num_refused)

    def _refuse(self, refused: Sequence[str]) -> None:
        self._recorder.add("refused_hints", len(refused))
        for sentence in refused:
            if sentence not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(sentence)
                logger.warning("kvpool: a request's kv_transfer_params have a hint that is refused: %s", sentence)
