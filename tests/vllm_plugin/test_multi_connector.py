"""Under a MultiConnector only the chosen connector loads, and the other's lease ends.

Each scenario passes, and fails where a bug that KV connectors are known for is put back in.
"""

from __future__ import annotations

from typing import Any

from vllm.config import KVTransferConfig

from testbed.engine import kvpool_transfer_config
from tests.conftest import StartServer
from tests.support.held import held_by
from tests.support.processes import wait_for
from tests.support.toy.engine import ToyEngine
from tests.support.toy.fixtures import MakeConfig
from tests.support.toy.fleet import stats_of
from tests.support.toy.model import answer
from tests.support.vllm_objects import tokens
from tests.vllm_plugin.bugs import assert_caught, held, replaced, submitted
from vllm_plugin.scheduler.scheduler import KVPoolScheduler
from vllm_plugin.worker.transfer import ReceiveThread


class MultiToy(ToyEngine):
    """A toy engine with several connectors of ours under vLLM's `MultiConnector`."""

    @property
    def sides(self) -> list[KVPoolScheduler]:
        return [child.scheduler_side for child in self.scheduler.connector.sub_connectors]

    def wait_until_connected(self) -> None:
        sessions = [each for side in self.sides for each in side.stages.sessions]
        sessions += [child.worker_side.session for rank in self.ranks for child in rank.connector.sub_connectors]
        wait_for(lambda: all(session.namespace for session in sessions), "connections to the pool")

    def count_stats(self, stats: dict[str, Any]) -> None:
        for each in stats.values():
            super().count_stats(each.get("data", each))


def test_a_connector_that_is_not_chosen_loads_nothing(vllm_config: MakeConfig, pool_server: StartServer) -> None:
    server = pool_server()
    prompts = [tokens(100, nth) for nth in range(3)]
    rounds = iter(range(2))

    def start(salt: str) -> MultiToy:
        endpoint = server.endpoint
        config = vllm_config(endpoint)
        patient = {"lookup_timeout_ms": 5_000, "decline_slow_loads": False, "max_pinned_fraction": 1.0}
        patient["load_timeout_ms"] = 30_000  # No lease ends by itself.
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "connectors": [kvpool_transfer_config(endpoint, salt=salt + name, **patient) for name in "ab"]
            },
        )
        return MultiToy(config)

    def scenario(deadline_s: float) -> None:
        salt = f"bug 16 {next(rounds)}"
        engines = [start(salt) for _ in range(2)]
        try:
            expected = [answer(prompt, 8) for prompt in prompts]
            assert engines[0].generate(*prompts) == expected
            with submitted(ReceiveThread) as jobs, held(ReceiveThread) as go:
                for nth, prompt in enumerate(prompts):
                    engines[1].add(f"r{nth}", prompt)
                engines[1].step_until(lambda: len({job.request_id for job in jobs}) == 3, "three loads")
                assert len(jobs) == 3, f"{len(jobs)} loads of 3 requests"
                for _ in range(3):
                    engines[1].step()
                wait_for(lambda: stats_of(server).num_leases == 3, "the other connector's leases to end")
                go.set()
                engines[1].run(deadline_s)
            assert [engines[1].answers[f"r{nth}"] for nth in range(3)] == expected
            assert set(engines[1].cached_tokens.values()) == {96}
            for engine in engines:
                kept = [each for side in engine.sides for each in held_by(side).values()]
                assert not any(kept) and engine.num_used_blocks() == 0, kept
        finally:
            for engine in engines:
                engine.shutdown()

    after_alloc = KVPoolScheduler.after_alloc

    def load_what_was_found(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        candidate = self.admission.candidates.get(request.request_id)
        found = candidate.boundary - candidate.asked if candidate is not None else 0
        after_alloc(self, request, blocks, found)

    assert_caught(scenario, replaced(KVPoolScheduler, "after_alloc", load_what_was_found), "6 loads of 3 requests")
