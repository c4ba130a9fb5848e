"""Errors that nobody foresees, raised by whatever functions of the connector and its client are chosen."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvpool.client.block_io import BlockMover
from kvpool.client.client import Client
from kvpool.client.rpc import PendingLookup, PoolRpc
from vllm_plugin.model.groups import Geometry
from vllm_plugin.scheduler.admission import Admission, PromotionWait
from vllm_plugin.scheduler.load_policy import LoadPolicy
from vllm_plugin.scheduler.loads import Loads
from vllm_plugin.scheduler.lookups import Lookups, RequestLookup
from vllm_plugin.scheduler.pool_contents import Events, PoolContents
from vllm_plugin.scheduler.provenance import PeerLoads, Resets
from vllm_plugin.scheduler.stages import Stages
from vllm_plugin.scheduler.store_jobs import StoreJobs
from vllm_plugin.scheduler.stores import Retention, Stores
from vllm_plugin.session import Session
from vllm_plugin.worker.copy import CpuCopier
from vllm_plugin.worker.transfer import ReceiveThread, SendThread
from vllm_plugin.worker.worker import KVPoolWorker

ERRORS: tuple[type[Exception], ...] = (
    RuntimeError, IndexError, KeyError, MemoryError, TypeError, AssertionError, OSError,
)  # fmt: skip

PLACES: dict[type, tuple[str, ...]] = {
    Admission: ("matched_tokens", "boundary", "look_up", "divergence", "_is_final", "_weigh", "_accept", "_judge"),
    BlockMover: ("move", "checksums"),
    Client: ("put", "get", "open_namespace"),
    CpuCopier: ("gather", "scatter", "in_place", "mark", "sums"),
    Events: ("stored", "missing", "take", "all_missing"),
    Geometry: ("blocks_to_compute",),
    KVPoolWorker: ("_drop",),
    LoadPolicy: ("step_began", "step_ended", "verdict", "load_ended", "compute_seconds"),
    Loads: ("verdict", "has_room", "stop_waiting", "parts", "begin", "transferred", "ended"),
    Lookups: ("send", "send_again", "receive", "_keep", "flush"),
    PeerLoads: ("prepare", "_judge"),
    PendingLookup: ("result", "done", "on_done"),
    PoolContents: ("missing", "stored", "was_stored"),
    PoolRpc: ("lookup_async", "put_start", "put_end", "locate", "release_quietly", "check", "revoke_quietly"),
    PromotionWait: ("lasts", "answer_s"),
    ReceiveThread: ("_transfer", "_get", "_namespace"),
    RequestLookup: ("leased", "must_be_sent_again"),
    Resets: ("finish",),
    Retention: ("blocks",),
    SendThread: ("_transfer", "_put", "_namespace", "drop"),
    Session: ("report", "_ping", "_probe"),
    Stages: ("compare",),
    StoreJobs: ("new_step", "make_room", "relieve", "take_dropped", "queue"),
    Stores: ("track", "proven", "loads", "build", "_job", "_store_job", "finish", "step_ended"),
}
"""What may raise. Not what keeps account of pins, nor the guard: they have to hold for anything else to."""


@dataclass(frozen=True)
class Sabotage:
    """What goes wrong.

    Args:
        places: (class, method) that raise.
        rate: of their calls.
        is_late: they raise once they have done their work.
        raised: how often each place has raised.
    """

    places: tuple[tuple[type, str], ...]
    error: type[Exception]
    rate: float
    is_late: bool
    seed: int
    raised: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, seed: int) -> Sabotage:
        """One by its seed."""
        dice = random.Random(seed)
        everything = [(owner, name) for owner, names in PLACES.items() for name in names]
        places = tuple(dice.sample(everything, dice.choice((1, 1, 1, 2, 5))))
        return cls(places, dice.choice(ERRORS), dice.choice((1.0, 0.5, 0.1)), dice.random() < 0.5, seed)

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Breaks the places until `patch` is undone."""
        dice = random.Random(self.seed)
        for owner, name in self.places:
            method = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
            patch.setattr(owner, name, self._broken(method, dice))

    def _broken(self, method: Any, dice: random.Random) -> Any:
        if isinstance(method, classmethod):
            return classmethod(self._broken(method.__func__, dice))
        if isinstance(method, staticmethod):
            return staticmethod(self._broken(method.__func__, dice))

        @functools.wraps(method)
        def broken(*args: Any, **kwargs: Any) -> Any:
            is_due = dice.random() < self.rate
            self.raised[f"{method.__qualname__}"] += is_due
            if is_due and not self.is_late:
                raise self.error("injected")
            result = method(*args, **kwargs)
            if is_due:
                raise self.error("injected")
            return result

        return broken
