"""The list of variants is made from vLLM and misses nothing; verdicts are right. No engine is started.

A field that vLLM adds fails `tests/vllm_plugin/model/test_kv_fields.py` until it is classified; a variable fails below.
"""

from __future__ import annotations

import numpy as np
import pytest
import vllm.envs

from tests.identity.oracle import Observation, Verdict, judge, pairs
from tests.identity.variants import BASE_VARIANT, COUNTED_VARIABLES, unvaried, variants, varied_fields, varied_variables
from vllm_plugin.model.kv_fields import Effect, effect

KV = np.ones(64, np.float32)


def observation(fingerprint: str = "a", kv: np.ndarray | None = KV, **fields: object) -> Observation:
    return Observation(BASE_VARIANT, fingerprint=fingerprint, kv=kv, **fields)  # type: ignore[arg-type]


def test_each_field_variable_and_file_left_out_is_varied_or_listed() -> None:
    names = {each.what for each in variants()}
    for section, each in varied_fields():
        assert (name := f"{section}.{each.name}") in names or name in unvaried()
    assert {f"environment.{name}" for name in varied_variables()} <= names
    assert {f"environment.{name}" for name in COUNTED_VARIABLES} <= names
    assert len({str(each) for each in variants()}) == len(variants())
    first = [each.what for each in variants()][: len(names)]
    assert set(first) == names, "a second value comes before the first one of another field"


def test_a_variable_that_vllm_adds_counts_until_it_is_classified(monkeypatch: pytest.MonkeyPatch) -> None:
    added = {**vllm.envs.environment_variables, "VLLM_ADDED_LATER": lambda: False}
    monkeypatch.setattr(vllm.envs, "environment_variables", added)
    assert "VLLM_ADDED_LATER" not in varied_variables()
    assert effect("environment", "VLLM_ADDED_LATER") == (Effect.VALUE, "not known to kvpool")


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        (observation(), Verdict.SAME),
        (observation(kv=KV + 1e-5), Verdict.SAME),
        (observation(kv=KV * 1.01), Verdict.FAILURE),
        (observation(kv=KV * np.nan), Verdict.FAILURE),
        (observation(kv=KV[:1]), Verdict.FAILURE),
        (observation(logprobs=[-1.0]), Verdict.SAME),
        (observation("b", KV * 2), Verdict.APART),
        (observation(kv=None), Verdict.SAME),
        (observation(kv=None, tokens=[1]), Verdict.FAILURE),
        (observation(refusal="ValueError: no"), Verdict.REFUSED),
    ],
)
def test_verdicts(other: Observation, verdict: Verdict) -> None:
    assert judge(observation(), other)[0] is verdict


def test_pairs_are_judged_unless_one_has_no_kv_and_the_other_samples_otherwise() -> None:
    found = [observation("a"), observation("b"), observation("b", KV * 2)]
    assert [verdict for _, _, verdict, _ in pairs(found)] == [Verdict.APART, Verdict.APART, Verdict.FAILURE]
    found = [observation(), observation(logprobs=[-1.0]), observation(kv=None)]
    assert [verdict for _, _, verdict, _ in pairs(found)] == [Verdict.SAME, Verdict.SAME]
