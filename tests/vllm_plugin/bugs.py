"""How a known bug is shown: a scenario that passes as the connector is, and fails where the bug is put back in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.request import RequestStatus

from tests.support.toy.engine import ToyEngine
from tests.support.toy.fleet import Fleet
from vllm_plugin.worker.transfer import TransferThread

Scenario = Callable[[float], None]
"""Runs engines to their end, each within so many seconds."""

FreshFleet = Callable[[], Fleet]
MODES = pytest.mark.parametrize("steps_ahead", [0, 1], ids=["synchronous", "asynchronous"])

PATIENCE_S = 30.0
HANG_S = 2.0
"""An engine with a bug that is to make it hang is given no longer."""

WRONG_KV = "attention reads KV that is not of its prefix"
HANGS = "the engine to be done: not within"


def assert_caught(scenario: Scenario, bug: Callable[[], AbstractContextManager[Any]], match: str) -> None:
    """The scenario passes, and fails while `bug` is in the connector, with a message in which `match` is."""
    scenario(PATIENCE_S)
    with bug(), pytest.raises(AssertionError) as caught:
        scenario(HANG_S if match == HANGS else PATIENCE_S)
    assert match in str(caught.value), caught.value


def replaced(owner: type, name: str, method: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """A bug that is one method."""
    return lambda: patch.object(owner, name, method)


@contextmanager
def held(thread: type[TransferThread[Any]]) -> Iterator[threading.Event]:
    """Transfers of one direction do not begin until the event is set."""
    transfer, go = thread._transfer, threading.Event()

    def wait_and_transfer(self: TransferThread[Any], job: Any, mark: Any) -> bool:
        go.wait(PATIENCE_S)
        return transfer(self, job, mark)

    with patch.object(thread, "_transfer", wait_and_transfer):
        try:
            yield go
        finally:
            go.set()


@contextmanager
def at_once(thread: type[TransferThread[Any]]) -> Iterator[None]:
    """Transfers of one direction are over when they have been submitted: nothing is faster."""

    def transfer_now(self: TransferThread[Any], job: Any) -> None:
        succeeded = self._transfer(job, self._copier.mark())
        with self._lock:
            self._ended.append((job, succeeded))

    with patch.object(thread, "submit", transfer_now):
        yield


@contextmanager
def failing(thread: type[TransferThread[Any]]) -> Iterator[None]:
    """Transfers of one direction fail, and what they are about stays in the pool as it is."""
    with patch.object(thread, "_transfer", lambda *_: False):
        yield


@contextmanager
def submitted(thread: type[TransferThread[Any]]) -> Iterator[list[Any]]:
    """The jobs that threads of one direction are given."""
    submit, jobs = thread.submit, list[Any]()

    def note_and_submit(self: TransferThread[Any], job: Any) -> None:
        jobs.append(job)
        submit(self, job)

    with patch.object(thread, "submit", note_and_submit):
        yield jobs


def step_until_loading(engine: ToyEngine, request: Any) -> None:
    """Until the worker has a request's load."""
    status = RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.step_until(lambda: request.status == status, f"{request.request_id} to load")


def blocks_of(jobs: list[Any]) -> set[int]:
    """Ids of all blocks that jobs move."""
    return {block_id for job in jobs for part in job.groups for row in part.block_ids for block_id in row}
