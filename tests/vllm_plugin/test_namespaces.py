"""Two engines whose KV bytes differ share no namespace.

Each scenario passes, and fails where a bug that KV connectors are known for is put back in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from kvpool.protocol.namespace import NamespaceSpec
from tests.support.vllm_objects import tokens
from tests.vllm_plugin.bugs import FreshFleet, assert_caught
from vllm_plugin.model import identity
from vllm_plugin.model.weights import Weights
from vllm_plugin.scheduler import scheduler
from vllm_plugin.worker import worker


@pytest.mark.parametrize(
    ("field", "setting", "ours", "theirs"),
    [
        ("model_dtype", "model_config.dtype", "bfloat16", "float16"),
        ("kv_cache_dtype", "cache_config.cache_dtype", "fp8_e4m3", "fp8_e5m2"),
        ("revision", "commit", "aa", "bb"),
        ("page_format", "device_config.device_type", "cpu", "cuda"),
        ("hash_seed", "PYTHONHASHSEED", "0", "1"),
        ("weights_digest", "weights", "aa", "bb"),
    ],
)
def test_a_namespace_names_what_the_bytes_depend_on(
    field: str,
    setting: str,
    ours: str,
    theirs: str,
    fresh_fleet: FreshFleet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = tokens(100)

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        for value in (ours, theirs):
            config = fleet.config()
            if setting in ("weights", "commit"):
                weights = Weights("model", "", value) if setting == "weights" else Weights("model", value, "")
                monkeypatch.setattr(identity, "describe_weights", lambda *_, weights=weights: weights)
            elif setting.isupper():
                monkeypatch.setenv(setting, value)
            else:
                part, name = setting.split(".")
                setattr(getattr(config, part), name, value)
            engine = fleet.make(config)
            engine.generate(tokens(10))  # Without a digest of files the ranks name the weights with a step.
            engine.wait_until_connected()
            engine.cached_tokens.clear()
            engine.generate(prompt)
            assert engine.cached_tokens["prompt-0"] == 0, f"{setting} = {theirs} reads blocks of {ours}"

    @contextmanager
    def dropped() -> Iterator[None]:
        def without(*args: Any) -> NamespaceSpec:
            return replace(identity.namespace_spec(*args), **{field: "x"})  # type: ignore[arg-type]

        with patch.object(scheduler, "namespace_spec", without), patch.object(worker, "namespace_spec", without):
            yield

    assert_caught(scenario, dropped, f"reads blocks of {ours}")
