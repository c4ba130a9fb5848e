"""A sample of the oracle's variants; and rules taken out of the namespace, which the oracle must then miss."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from testbed.tiny_models import write
from tests.identity.oracle import Observation, Verdict, judge, observe, write_base
from tests.identity.variants import BASE_VARIANT, OTHER_WEIGHTS, Variant, variants
from tests.support.real_engines import small_processes

pytestmark = pytest.mark.vllm

SAMPLE = ("scheduler_config.max_num_seqs=16", "file tokenizer*=tokenizerx.json: {}")
LONGER_SAMPLE = ("model_config.seed=1", "model_config.max_model_len=2048", "environment.VLLM_USE_AOT_COMPILE=0")
INDEX = "file model.safetensors.index.json"
ROUTING = "environment.VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
RULES = (INDEX, ROUTING, "class")
EXTENDED = {"worker_extension_cls": "tests.identity.extensions.Extension"}

Observe = Callable[..., Observation]


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model of the base engine; engines are forked (`testbed.fork_server`)."""
    with small_processes(tmp_path_factory.mktemp("forks")):
        yield write_base(tmp_path_factory.mktemp("identity") / "base")


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Observe:
    """Runs an engine of a variant, with every rule of `RULES` also taken out of its namespace."""
    numbers = itertools.count()

    def run(variant: Variant, model: Path = base_model) -> Observation:
        return observe(model, variant, tmp_path_factory.mktemp(f"variant-{next(numbers)}"), RULES)

    return run


@pytest.fixture(scope="module")
def base(observed: Observe) -> Observation:
    return observed(BASE_VARIANT)


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
@pytest.mark.parametrize(
    ("rule", "shape", "environment"),
    [
        pytest.param("class", "", {"OTHER_LLAMA": "1"}, id="class"),
        pytest.param(ROUTING, "gpt_oss", {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_int32"}, id="routing"),
    ],
)
def test_without_a_plugin_in_the_namespace_the_oracle_fails(
    rule: str, shape: str, environment: dict[str, str], base_model: Path, observed: Observe, tmp_path: Path
) -> None:
    model = write(shape, tmp_path) if shape else base_model
    plain, extended = (observed(Variant(rule, str(each), EXTENDED, each), model) for each in ({}, environment))
    _assert_found(plain, extended, rule)


def _assert_found(one: Observation, other: Observation, rule: str) -> None:
    assert judge(one, other) == (Verdict.APART, "")
    verdict, why = judge(one, other, without=rule)
    assert verdict is Verdict.FAILURE, f"with {rule} taken out: {verdict} {why}"
    assert "KV differs" in why


def _index(model: Path, chosen: str) -> str:
    """An index that finds every tensor in one file."""
    with safe_open(model / "model.safetensors", "pt") as weights:
        return json.dumps({"weight_map": dict.fromkeys(weights.keys(), chosen)})
