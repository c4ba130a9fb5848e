"""A proxy around any `KVConnectorBase_V1` that forwards every hook and records the call and its answer.

The proxy's class is made from the interface itself, so a hook that a later vLLM adds is recorded too. What is written
down is plain and frozen: the objects behind it live on and change. Single-threaded, as the hooks of a side are; both
sides of a toy engine are called by one thread.
"""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    supports_hma,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

SCHEDULER = "scheduler"
WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Call:
    """One hook call.

    Args:
        rank: -1 for the scheduler's side.
        facts: arguments that matter, by name.
        answer: what the engine got.
        extras: what the recorder found out beside: a second answer, whether the answer can be pickled.
        pinned: block -> references that the call took (negative: gave back).
        error: the exception's text, if it raised.
    """

    step: int
    side: str
    rank: int
    hook: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    answer: Any = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    pinned: Mapping[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None

    @property
    def request_id(self) -> str:
        return str(self.facts["request"].request_id)


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened outside the hooks: an act of the engine, a finding in its memory."""

    step: int
    what: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestFacts:
    request_id: str
    num_tokens: int
    num_computed_tokens: int
    block_hashes: tuple[bytes, ...]


@dataclass
class Recording:
    """What happened, in order. `rules.violations` judges it.

    Args:
        hook_limit_s: how long a hook may take.
    """

    hook_limit_s: float = 5.0
    world_size: int = 1
    num_groups: int = 1
    events: list[Call | Note] = field(default_factory=list)
    step: int = 0

    def note(self, what: str, **facts: Any) -> None:
        self.events.append(Note(self.step, what, facts))

    def calls(self, *hooks: str, side: str | None = None) -> Iterator[Call]:
        """Calls of some hooks; of all without a name."""
        for event in self.events:
            if isinstance(event, Call) and (not hooks or event.hook in hooks) and side in (None, event.side):
                yield event

    def notes(self, what: str) -> Iterator[Note]:
        return (event for event in self.events if isinstance(event, Note) and event.what == what)


class Watch:
    """Observer of the recorded calls; `ownership.Ownership` is one."""

    def references(self) -> list[int]:
        """The reference count of each block."""
        return []

    def after(self, call: Call) -> None:
        """Called after each hook, before the call is recorded."""


@dataclass
class Recorder:
    recording: Recording
    watch: Watch = field(default_factory=Watch)

    def wrap(self, connector: KVConnectorBase_V1, side: str, rank: int = -1) -> KVConnectorBase_V1:
        """A recording proxy of the connector."""
        bases: tuple[type, ...] = (Recorded, SupportsHMA) if supports_hma(connector) else (Recorded,)
        members: dict[str, Any] = {}
        for base in (KVConnectorBase_V1, *bases[1:]):
            for name, member in inspect.getmembers(base):
                if name.startswith("_"):
                    continue
                if isinstance(member, property):
                    members[name] = property(_reader(name))
                elif inspect.isfunction(member):
                    members[name] = _forwarder(name, inspect.signature(member))
        proxy_class = type(f"Recorded{type(connector).__name__}", bases, members)
        proxy: KVConnectorBase_V1 = proxy_class(connector, self, side, rank)
        return proxy


class Recorded(KVConnectorBase_V1):  # type: ignore[misc]
    """Base of all proxies. Its state is the connector's, so the connector's constructor is not called."""

    def __init__(self, inner: KVConnectorBase_V1, recorder: Recorder, side: str, rank: int):
        self._inner = inner
        self._recorder = recorder
        self._side = side
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def _call(self, hook: str, arguments: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
        """Calls the hook and records the call, whether the hook returns or raises."""
        ask = getattr(self._inner, hook)
        facts = {name: describe(value) for name, value in arguments.items()}
        recording, watch = self._recorder.recording, self._recorder.watch
        references = watch.references()
        extras: dict[str, Any] = {}
        answer, error = None, None
        started = time.monotonic()
        try:
            answer = _ASK.get(hook, _once)(ask, extras, args, kwargs)
            return answer  # The very object: the proxy changes nothing.
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            seconds = time.monotonic() - started
            pairs = enumerate(zip(references, watch.references(), strict=True))
            pinned = {block: now - then for block, (then, now) in pairs if now != then}
            call = Call(
                recording.step,
                self._side,
                self._rank,
                hook,
                facts,
                describe(answer),
                extras,
                pinned,
                seconds,
                error,
            )
            watch.after(call)
            recording.events.append(call)


def _reader(name: str) -> Callable[[Recorded], Any]:
    return lambda self: self.__getattr__(name)


def _forwarder(hook: str, signature: inspect.Signature) -> Callable[..., Any]:
    def forward(self: Recorded, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        arguments.pop("self")
        return self._call(hook, arguments, args, kwargs)

    return forward


# How a hook is asked: some are asked twice, some answers are tried on the wire.


def _once(ask: Callable[..., Any], extras: dict[str, Any], args: Any, kwargs: Any) -> Any:
    return ask(*args, **kwargs)


def _ask_match(ask: Callable[..., Any], extras: dict[str, Any], args: Any, kwargs: Any) -> Any:
    extras["first"] = ask(*args, **kwargs)
    return ask(*args, **kwargs)


def _ask_events(ask: Callable[..., Any], extras: dict[str, Any], args: Any, kwargs: Any) -> Any:
    events = list(ask(*args, **kwargs))
    extras["again"] = list(ask(*args, **kwargs))
    extras["wire"] = [_trial(partial(msgspec.msgpack.encode, event)) for event in events]
    return events


def _ask_metadata(ask: Callable[..., Any], extras: dict[str, Any], args: Any, kwargs: Any) -> Any:
    before = _digest(args[0])
    metadata = ask(*args, **kwargs)
    after = _digest(args[0])
    extras["changed"] = [name for name in before if before[name] != after[name]]
    extras["is_metadata"] = isinstance(metadata, KVConnectorMetadata)
    extras["pickle"] = _trial(lambda: pickle.loads(pickle.dumps(metadata)))
    extras["num_bytes"] = len(pickle.dumps(metadata)) if extras["pickle"] is None else 0
    return metadata


def _ask_worker_metadata(ask: Callable[..., Any], extras: dict[str, Any], args: Any, kwargs: Any) -> Any:
    metadata = ask(*args, **kwargs)
    if metadata is not None:
        extras["is_metadata"] = isinstance(metadata, KVConnectorWorkerMetadata)
        extras["pickle"] = _trial(lambda: pickle.loads(pickle.dumps(metadata)))
        if extras["pickle"] is None and extras["is_metadata"]:
            extras["aggregate"] = _trial(lambda: _aggregate(metadata))
    return metadata


def _ask_stats(ask: Callable[..., Any], extras: dict[str, Any], args: Any, kwargs: Any) -> Any:
    stats = ask(*args, **kwargs)
    if stats is not None:
        extras["wire"] = _trial(lambda: (msgspec.msgpack.encode(stats.to_dict()), pickle.dumps(stats)))
    return stats


def _ask_finished(ask: Callable[..., Any], extras: dict[str, Any], args: Any, kwargs: Any) -> Any:
    answer = ask(*args, **kwargs)
    extras["wire"] = _trial(lambda: msgspec.msgpack.encode(answer[1]))
    return answer


_ASK: dict[str, Callable[..., Any]] = {
    "get_num_new_matched_tokens": _ask_match,
    "take_events": _ask_events,
    "build_connector_meta": _ask_metadata,
    "build_connector_worker_meta": _ask_worker_metadata,
    "get_kv_connector_stats": _ask_stats,
    "request_finished": _ask_finished,
    "request_finished_all_groups": _ask_finished,
}


def _trial(attempt: Callable[[], Any]) -> str | None:
    """None if it works, else why not."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _aggregate(metadata: KVConnectorWorkerMetadata) -> None:
    one, other = pickle.loads(pickle.dumps((metadata, metadata)))
    merged = one.aggregate(other)
    if not isinstance(merged, KVConnectorWorkerMetadata):
        raise TypeError(f"aggregate() answered {type(merged).__name__}")
    pickle.dumps(merged)


def _digest(output: SchedulerOutput) -> dict[str, bytes]:
    # Block tables are resolved on demand; blocks to zero may be cut by a connector that overwrites them.
    exempt = {"kv_connector_block_state", "new_block_ids_to_zero", "kv_connector_metadata"}
    return {item.name: pickle.dumps(getattr(output, item.name)) for item in fields(output) if item.name not in exempt}


def describe(value: Any) -> Any:
    """A plain, frozen copy of what matters of an argument or an answer."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case Request():
            facts = (value.request_id, value.num_tokens, value.num_computed_tokens, tuple(value.block_hashes))
            return RequestFacts(*facts)
        case KVCacheBlocks():
            return tuple(tuple(group) for group in value.get_block_ids())
        case SchedulerOutput():
            return {
                "num_scheduled_tokens": dict(value.num_scheduled_tokens),
                "finished_req_ids": frozenset(value.finished_req_ids),
                "has_sync_kv_loads": value.has_sync_kv_loads,
            }
        case KVConnectorTransferResults() | KVConnectorOutput():
            return {
                name: frozenset(getattr(value, name) or ())
                for name in ("finished_sending", "finished_recving", "failed_recving")
            }
        case torch.Tensor():
            return tuple(value.shape)
        case Mapping():
            return {describe(key): describe(item) for key, item in value.items()}
        case set() | frozenset():
            return frozenset(describe(item) for item in value)
        case Iterable() if isinstance(value, list | tuple):
            return tuple(describe(item) for item in value)
        case msgspec.Struct():
            return value
    return f"<{type(value).__name__}>"
