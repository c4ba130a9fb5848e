"""A request of real vLLM pins its prompt. Expiry and prefetches: `tests/vllm_plugin/scheduler/test_hints.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from testbed.engine import BLOCK_TOKENS, Answer, Engine, EngineSpec, kvpool_transfer_config
from tests.e2e.conftest import FLOAT32, PATIENT, assert_same, hit_tokens, pool_stats, prompt, running
from tests.support.processes import ServerProcess, wait_for
from tests.support.real_engines import drain

pytestmark = pytest.mark.vllm

TOKENS = 500
NUM_BLOCKS = TOKENS // BLOCK_TOKENS


class Rig:
    """A pool whose memory has room for four prompts with their answers, a tier under it, and an engine."""

    def __init__(self, server: ServerProcess, engine: Engine):
        self.server, self.engine = server, engine
        self.client = Client(ClientConfig(server.endpoint, timeout_ms=60_000))

    def ask(self, each: list[int], **hints: Any) -> Answer:
        """Waits until the answer's blocks are stored; the engine's own cache is empty then."""
        options = {"extra_args": {"kv_transfer_params": {"kvpool": hints}}} if hints else {}
        (answer,) = self.engine.generate([each], **options)
        drain(self.engine)
        return answer

    def others(self, count: int, seed: str) -> None:
        for nth in range(count):
            self.ask(prompt(TOKENS, f"{seed} {nth}"))
            self.written()

    def written(self) -> None:
        """Waits until the tier has what memory has: a block is leased while it is written."""

        def lacking() -> bool:
            (info,) = self.client.admin.namespaces()
            return info.tiers[0].num_entries < info.num_entries

        wait_for(lambda: not lacking(), "the blocks to be in the tier", 60)

    @property
    def num_promoted(self) -> int:
        return pool_stats(self.server).tiers[0].counters["promoted_blocks"]

    def count(self, name: str) -> int:
        return pool_stats(self.server).counters[name]

    def pinned_bytes(self) -> int:
        return pool_stats(self.server).pinned_bytes


@pytest.fixture(scope="module")
def rig(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("hints")
    with ExitStack() as stack:
        tier = f"file:{directory / 'tier'},size=256MiB,create=yes"
        server = ServerProcess(
            directory, "--memory", "8MiB", "--policy", "lru", "--pin-budget", "50%", "--grace-ms", "100", "--tier", tier
        )
        stack.callback(server.stop)
        transfer = kvpool_transfer_config(server.endpoint, **PATIENT, promotion_wait_ms=60_000)
        (engine,) = stack.enter_context(running(directory, EngineSpec(model, transfer, FLOAT32, in_process=True)))
        yield Rig(server, engine)


@pytest.fixture(autouse=True)
def _empty(rig: Rig) -> None:
    rig.client.admin.clear()


def test_a_request_pins_its_prompt(rig: Rig) -> None:
    each = prompt(TOKENS, "a system prompt")
    right = rig.ask(each, pin_s=600, colour="red")
    assert right.cached_tokens == 0
    assert "unknown key 'colour'; give pin_s, expire or prefetch" in rig.engine.log()
    wait_for(rig.pinned_bytes, "the pin", 60)
    group = rig.client.admin.namespaces()[0].spec.groups[0]
    slot_bytes = group.num_shards * group.chunk_bytes
    wait_for(lambda: rig.pinned_bytes() == NUM_BLOCKS * slot_bytes, "the prompt's blocks to be pinned", 60)
    rig.others(6, "not pinned")
    before = rig.num_promoted
    answer = rig.ask(each)
    assert_same([answer], [right])
    assert answer.cached_tokens == hit_tokens(TOKENS) and rig.num_promoted == before, "the prompt was evicted"
    assert rig.count("pin_given_back_blocks") == 0
