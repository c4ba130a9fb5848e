from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpool.doctor import engine
from kvpool.doctor.finding import Finding, Level
from kvpool.errors import InvalidRequestError

GOOD = {"kv_connector": "KVPoolConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def arguments(transfer: dict[str, object] | None = None, *more: str, algorithm: str = "sha256_cbor") -> str:
    config = f"--kv-transfer-config '{json.dumps(GOOD if transfer is None else transfer)}'"
    return " ".join(["vllm serve m", f"--prefix-caching-hash-algo {algorithm}" if algorithm else "", config, *more])


def levels(findings: list[Finding]) -> dict[str, Level]:
    return {each.check: each.level for each in findings if each.level is not Level.OK}


def of(text: str) -> dict[str, Level]:
    return levels(engine.settings(engine.of_arguments(text)))


def test_good_arguments_have_no_problem() -> None:
    assert of(arguments()) == {}
    assert of(arguments().replace("--prefix-caching-hash-algo ", "--prefix-caching-hash-algo=")) == {}
    inner = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [GOOD]}}
    assert of(arguments({**inner, "kv_load_failure_policy": "recompute"})) == {}


@pytest.mark.parametrize(
    ("text", "check", "level"),
    [
        (arguments(algorithm=""), "hash algorithm", Level.ERROR),
        (arguments(algorithm="sha256"), "hash algorithm", Level.ERROR),
        (f"PYTHONHASHSEED=0 {arguments()}", "hash seed", Level.WARNING),
        (arguments({**GOOD, "kv_load_failure_policy": "fail"}), "kv_load_failure_policy", Level.WARNING),
        (
            arguments({name: value for name, value in GOOD.items() if name != "kv_load_failure_policy"}),
            "kv_load_failure_policy",
            Level.WARNING,
        ),
        (arguments({**GOOD, "kv_role": "kv_consumer"}), "kv_role", Level.WARNING),
        (arguments({**GOOD, "kv_connector": "NixlConnector"}), "connector", Level.ERROR),
        (arguments(None, "--no-enable-prefix-caching"), "prefix caching", Level.WARNING),
    ],
)
def test_each_bad_argument_is_named(text: str, check: str, level: Level) -> None:
    assert of(text) == {check: level}


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    there = tmp_path / "ca.crt"
    there.touch()
    tls = {"ca": str(there), "cert": "pki/tls.crt", "key": "/\0"}
    extra = {"kv_connector_extra_config": {"tls": tls, "token_file": "no/token"}}
    names = {"tls.cert", "tls.key", "token_file"}
    assert of(arguments({**GOOD, **extra})) == dict.fromkeys(names, Level.WARNING)
    found = engine.settings(engine.of_arguments(arguments({**GOOD, **extra})))
    (told,) = (each.text for each in found if each.check == "tls.cert")
    assert told == f"the arguments: tls.cert pki/tls.crt is not on this host, seen from {Path.cwd()}"
    assert of(arguments({**GOOD, "kv_connector_extra_config": {"tls": 7, "connectors": 7}})) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("vllm 'serve", "--vllm-args cannot be read: No closing quotation"),
        ("vllm serve --kv-transfer-config '{'", "--kv-transfer-config in --vllm-args is not JSON"),
        ("vllm serve --kv-transfer-config '[]'", "is no JSON object"),
    ],
)
def test_arguments_that_cannot_be_read_are_one_sentence(text: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        engine.of_arguments(text)
