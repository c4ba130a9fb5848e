"""A sample of the oracle's variants; and rules taken out of the namespace, which the oracle must then miss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from testbed.tiny_models import write
from tests.identity.conftest import INDEX, ROUTING, RULES, Observe
from tests.identity.oracle import Observation, Verdict, judge, observe
from tests.identity.variants import OTHER_WEIGHTS, Variant, variants

pytestmark = pytest.mark.vllm

SAMPLE = ("scheduler_config.max_num_seqs=16", "file tokenizer*=tokenizerx.json: {}")
LONGER_SAMPLE = ("model_config.seed=1", "model_config.max_model_len=2048", "environment.VLLM_USE_AOT_COMPILE=0")


@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.more) for name in LONGER_SAMPLE)])
def test_an_engine_of_the_same_namespace_computes_the_same(name: str, base: Observation, observed: Observe) -> None:
    (variant,) = [each for each in variants() if str(each) == name]
    verdict, why = judge(base, observed(variant))
    assert verdict is Verdict.SAME, why


def test_without_the_index_in_the_namespace_the_oracle_fails(
    base_model: Path, base: Observation, observed: Observe
) -> None:
    """The index chooses between two files of weights, both there: only the index differs."""
    second = "model-00001-of-00002.safetensors"
    one, other = (
        observed(
            Variant(
                INDEX, chosen, files={second: OTHER_WEIGHTS, "model.safetensors.index.json": _index(base_model, chosen)}
            )
        )
        for chosen in ("model.safetensors", second)
    )
    _assert_found(one, other, INDEX)
    assert judge(base, one)[0] is Verdict.APART


@pytest.mark.more
def test_without_registered_classes_in_the_namespace_the_oracle_fails(observed: Observe) -> None:
    options = {"worker_extension_cls": "tests.identity.other_llama.Extension"}
    one, other = (
        observed(Variant("class", name, options, environment))
        for name, environment in (("vLLM's own", {}), ("scaled", {"OTHER_LLAMA": "1"}))
    )
    _assert_found(one, other, "class")


@pytest.mark.more
def test_without_the_routing_variable_in_the_namespace_the_oracle_fails(shapes: Path, tmp_path: Path) -> None:
    model = write("gpt_oss", shapes)
    engines = []
    options = {"worker_extension_cls": "tests.identity.int32_routing.Extension"}
    for nth, environment in enumerate(({}, {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_int32"})):
        (scratch := tmp_path / f"{nth}").mkdir()
        engines.append(observe(model, Variant(ROUTING, f"{nth}", options, environment), scratch, RULES))
    _assert_found(engines[0], engines[1], ROUTING)


@pytest.fixture
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


def _assert_found(one: Observation, other: Observation, rule: str) -> None:
    assert judge(one, other) == (Verdict.APART, "")
    verdict, why = judge(one, other, without=rule)
    assert verdict is Verdict.FAILURE, f"with {rule} taken out: {verdict} {why}"
    assert "KV differs" in why


def _index(model: Path, chosen: str) -> str:
    """An index that finds every tensor in one file."""
    with safe_open(model / "model.safetensors", "pt") as weights:
        return json.dumps({"weight_map": dict.fromkeys(weights.keys(), chosen)})
