"""Connectors at rest, and that each of those rules catches who breaks it."""

from __future__ import annotations

import pytest

from tests.conformance.statics import STATIC_RULES, connector_class, import_side_effects, static_violations
from tests.conformance.subject import Subject
from tests.support.toy.fixtures import MakeConfig
from tests.support.vllm_objects import cache_config

BROKEN = {
    "constructor-needs-no-kv-cache": "WantsTheCacheAtOnce",
    "shutdown-ends-threads": "LeavesAThread",
    "requires-kv-delivery-is-a-bool": "DeliversPerhaps",
    "required-layout-is-known": "WantsItsOwnLayout",
    "role-is-kept": "SwapsItsRole",
}
SUBJECTS = [
    Subject("KVPoolConnector", "vllm_plugin.connector", {"endpoint": "127.0.0.1:1"}),
    Subject("ReferenceConnector", "tests.conformance.reference"),
]


def test_imports_have_no_side_effects(vllm_config: MakeConfig) -> None:
    modules = [connector_class(subject.configure(vllm_config())).__module__ for subject in SUBJECTS]
    found = import_side_effects([*modules, "tests.conformance.broken_import"])
    assert {line.split(":")[0] for line in found} == {
        "tests.conformance.broken_import threads",
        "tests.conformance.broken_import sockets",
    }


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.connector)
def test_a_connector_at_rest(subject: Subject, vllm_config: MakeConfig) -> None:
    assert static_violations(subject.configure(vllm_config()), cache_config()) == {}


def test_every_rule_has_a_connector_that_breaks_it() -> None:
    assert BROKEN.keys() == STATIC_RULES.keys()


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_connector_is_caught(rule: str, vllm_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.conformance.statics.THREADS_END_WITHIN_S", 0.1)
    config = Subject(BROKEN[rule], "tests.conformance.broken", {"thread": True}).configure(vllm_config())
    assert list(STATIC_RULES[rule](config, cache_config()))
