"""What real engines report adds up on the server to vLLM's own counts."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.v1 import pool_pb2 as pb
from testbed.engine import Answer, Engine, EngineSpec, kvpool_transfer_config
from testbed.tiny_models import write
from tests.e2e.computed import COMPUTED, causes_of
from tests.e2e.conftest import FLOAT32, PATIENT, hit_tokens, prompt, running
from tests.support.processes import ServerProcess, run_command, wait_for
from tests.support.real_engines import drain, one_by_one

pytestmark = pytest.mark.vllm

LENGTH = 400
FULL = hit_tokens(LENGTH)
PROMPTS = [prompt(LENGTH, f"reported {nth}") for nth in range(16)]
REPORTED_S = 60.0
BY_SOURCE = "vllm:prompt_tokens_by_source"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with_ledger = ServerProcess(
        tmp_path_factory.mktemp("server"), "--memory", "64MiB", "--ledger",
        str(tmp_path_factory.mktemp("ledger") / "ledger.sqlite"),
    )  # fmt: skip
    yield with_ledger
    with_ledger.stop()


def namespace_of(client: Client) -> pb.NamespaceInfo:
    (info,) = client.admin.namespaces()
    return info


def counted(*engines: Engine) -> Counter[str]:
    """Computed tokens by cause, as vLLM's own metrics of the connector have them."""
    found: Counter[str] = Counter()
    for engine in engines:
        for name, value in engine.metrics().items():
            if name.startswith(f"{COMPUTED}:") and value:
                found[name.removeprefix(f"{COMPUTED}:")] += int(value)
    return found


def test_engines_report_what_they_count(tmp_path: Path, shapes_dir: Path, server: ServerProcess) -> None:
    transfer = kvpool_transfer_config(server.endpoint, **PATIENT)
    spec = EngineSpec(write("llama", shapes_dir), transfer, FLOAT32, in_process=True)
    with Client(ClientConfig(server.endpoint, timeout_ms=60_000)) as client:
        with running(tmp_path, spec, spec) as (writer, reader):
            expected = one_by_one(writer, PROMPTS)
            drain(writer)
            answers: list[Answer] = []
            causes = causes_of(reader, lambda: answers.extend(one_by_one(reader, PROMPTS)))
            assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
            assert set(causes) == {"last_block"}

            wait_for(lambda: len(client.admin.stats().engines) == 2, "both engines to report", REPORTED_S)
            computed, metrics = counted(writer, reader), [engine.metrics() for engine in (writer, reader)]
            assert sum(computed.values()) == sum(each[f"{BY_SOURCE}:local_compute"] for each in metrics)
            wait_for(
                lambda: dict(namespace_of(client).computed_tokens) == computed,
                "the server to know what vLLM counts",
                REPORTED_S,
            )
            loaded = sum(each.get(f"{BY_SOURCE}:external_kv_transfer", 0) for each in metrics)
            assert {state.transport for state in client.admin.stats().engines} == {"shm"}

        assert not client.admin.stats().engines, "both have said that they end"
        assert dict(namespace_of(client).computed_tokens) == computed
        page = client.admin.ledger(0)
        assert sum(row.loaded_tokens for row in page.rows) == loaded == FULL * len(PROMPTS)
        assert sum((Counter(row.computed_tokens) for row in page.rows), Counter()) == computed
        num_requests = sum(row.num_requests for row in page.rows)
        assert num_requests == sum(each["vllm:request_success"] for each in metrics) >= 2 * len(PROMPTS)

    told = json.loads(
        run_command(sys.executable, "-m", "kvpool.cli", "ledger", "--json", "--endpoint", server.endpoint).stdout
    )
    assert told["rows"][0]["computed_tokens"] == dict(computed)
