"""Three servers over one shared directory are restarted one after the other, under load.

No request fails, and each server's hit ratio comes back from the tier. With a drain no load and no store that was
granted is lost either. The long form upgrades from the previous release, whose servers know SIGTERM alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from testbed.ports import free_endpoint
from tests.conftest import PRINTED
from tests.skew.releases import CURRENT, Tree, previous
from tests.support.pool_load import PoolLoad, Tally
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import group_spec, namespace_spec

NUM_SERVERS = 3
WINDOW_S = 0.5
BACK_S = 60.0
"""The promise: so long after its restart a server hits as before."""


class Fleet:
    """Servers with a directory in common, each with a name, an endpoint and an engine that keeps it busy."""

    def __init__(self, folder: Path, stack: ExitStack, tree: Tree):
        self._folder, self._stack = folder, stack
        (folder / "tier").mkdir()
        self.endpoints = [free_endpoint() for _ in range(NUM_SERVERS)]
        self._servers = [self._start(nth, tree) for nth in range(NUM_SERVERS)]
        spec = namespace_spec(group_spec(chunk_bytes=4_096))
        self.loads = [PoolLoad(endpoint, spec, seed) for seed, endpoint in enumerate(self.endpoints)]
        for load in self.loads:
            load.start()
            stack.callback(load.stop)

    def _start(self, nth: int, tree: Tree) -> ServerProcess:
        tier = f"file:{self._folder / 'tier'},name=server-{nth},size=64MiB"
        flags = ("--listen", self.endpoints[nth], "--tier", tier, "--drain-ms", "5000", "--memory", "64MiB")
        server = ServerProcess(self._folder / f"log-{nth}", *flags, tree=tree.path)
        self._stack.callback(server.stop)
        return server

    def restart(self, nth: int, *, drains: bool) -> float:
        """Restarts a server as the current release; returns when the new one answered."""
        if drains:
            with Client(ClientConfig(self.endpoints[nth], timeout_ms=5_000)) as client:
                client.admin.drain()
        else:
            self._servers[nth].terminate()
        assert self._servers[nth].wait(30) == 0
        self._servers[nth] = self._start(nth, CURRENT)
        return time.monotonic()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[[Tree], Fleet]]:
    with ExitStack() as stack:
        yield lambda tree: Fleet(tmp_path, stack, tree)


def _warm(tally: Tally) -> float | None:
    """When an engine hits nearly all that it asks for; None: not yet."""
    return tally.back_at(0.0, 0.95, WINDOW_S)


def _roll(fleet: Fleet, *, drains: bool) -> list[float]:
    """Restarts all servers in turn; returns how long each took until its hit ratio was back."""
    tallies = [load.tally for load in fleet.loads]
    wait_for(lambda: all(_warm(tally) is not None for tally in tallies), "a warm pool", BACK_S)
    took = []
    for nth, tally in enumerate(tallies):
        now = time.monotonic()
        before = tally.hit_ratio(now - WINDOW_S, now)
        assert before > 0.9
        answered = fleet.restart(nth, drains=drains)
        back_at = wait_for(
            lambda tally=tally, answered=answered, before=before: tally.back_at(answered, 0.95 * before, WINDOW_S),
            "the hit ratio of before",
            BACK_S,
        )
        took.append(back_at - answered)
    for load in fleet.loads:
        load.stop()
    return took


@pytest.mark.parametrize("kind", ["restart", "upgrade"])
def test_rolling_fails_no_request_and_a_restart_with_a_drain_loses_no_load_or_store(
    fleet: Callable[[Tree], Fleet], tmp_path: Path, record_property: Callable[..., None], kind: str
) -> None:
    is_restart = kind == "restart"
    rolled = fleet(CURRENT if is_restart else previous(tmp_path / "previous"))
    took = _roll(rolled, drains=is_restart)
    tallies = [load.tally for load in rolled.loads]
    assert [tally.failed for tally in tallies] == [[]] * NUM_SERVERS
    lost = [len(tally.lost) for tally in tallies]
    assert not is_restart or not any(lost)
    requests, seconds = sum(len(tally.served) for tally in tallies), ", ".join(f"{each:.1f}" for each in took)
    told = f"{requests} requests, 0 failed, {sum(lost)} loads and stores lost; hits back within {seconds} s"
    record_property(PRINTED, f"rolling {kind}: {told}")
