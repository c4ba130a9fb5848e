from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kvpool.doctor import engine
from kvpool.doctor.finding import Finding, Level
from kvpool.errors import ConfigError, InvalidRequestError

GOOD = {"kv_connector": "KVPoolConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
PREFIX = "(EngineCore pid=7) INFO 11-23 05:30:26 [session.py:220] "
CONNECTED = f"{PREFIX}scheduler: kvpool at 127.0.0.1:50051, namespace 20d9633a733c, transport shm, 524288 bytes a block"
AWAY = (
    "WARNING [session.py:119] kvpool is away: the engine computes without the pool and retries in the background: "
    "cannot reach kvpool-server at h:1"
)
ARGUMENTS = (
    "INFO [api_utils.py:286] non-default args: {'block_size': 32, 'prefix_caching_hash_algo': 'sha256_cbor', "
    "'kv_transfer_config': KVTransferConfig(kv_connector='KVPoolConnector', kv_role='kv_both', "
    "kv_load_failure_policy='recompute'), 'model': '/m'}"
)


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
    assert engine.complaints("kvpool: another_library.ConfigError: no")[0].level is Level.WARNING
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


def test_a_good_log_has_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(f"{ARGUMENTS}\n{CONNECTED}\n")
    found = engine.log_file(path)
    assert levels(found) == {} and "the connector reached the server" in found[-1].text


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("'sha256_cbor'", "'sha256'", {"hash algorithm": Level.ERROR}),
        ("'prefix_caching_hash_algo': 'sha256_cbor', ", "", {"hash algorithm": Level.ERROR}),
        ("'recompute'", "'fail'", {"kv_load_failure_policy": Level.WARNING}),
        ("KVPoolConnector", "NixlConnector", {"connector": Level.ERROR}),
        ("'kv_both'", "'kv_producer'", {"kv_role": Level.WARNING}),
        ("{'block_size'", "{'enable_prefix_caching': False, 'block_size'", {"prefix caching": Level.WARNING}),
    ],
)
def test_settings_in_a_log_are_checked(old: str, new: str, expected: dict[str, Level]) -> None:
    given = engine.of_log(ARGUMENTS.replace(old, new))
    assert given is not None and levels(engine.settings(given)) == expected
    assert engine.of_log(CONNECTED) is None


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("kvpool is off for this engine: ranks differ", Level.ERROR),
        ("kvpool: KV sharing is off for this engine until it is started again: why", Level.ERROR),
        ("kvpool: lookup failed with an unexpected error, and the engine continues", Level.ERROR),
        ("kvpool.errors.ConfigError: cannot read pki/ca.crt (seen from /): No such file or directory", Level.ERROR),
        ("kvpool: kv_load_failure_policy is 'fail': a request whose load from the pool fails will fail", Level.WARNING),
        ("s: kvpool has another namespace of m, of which nothing can be read in 3f2a, because dtype", Level.WARNING),
        ("kvpool: a load of 7 KV blocks failed, so their request will be computed: slow", Level.WARNING),
        ("kvpool: 8 KV blocks were not stored in the pool: slow", Level.WARNING),
        ("kvpool: 1 of 8 KV blocks of a load left the pool; vLLM computes them", Level.WARNING),
        ("w: kvpool at h:1, namespace 20d9633a733c, transport grpc (slow: no data port), 1 bytes", Level.WARNING),
        ("kvpool is tested with vLLM 0.32, and this is vLLM 9, whose connector interface may differ", Level.WARNING),
        ("kvpool cannot read the weights in memory (no): a reset ends sharing with others", Level.WARNING),
        ("kvpool: KV sharing is off until the engine's blocks in use are free", Level.WARNING),
    ],
)  # fmt: skip
def test_each_complaint_of_the_connector_is_found(line: str, level: Level) -> None:
    found = engine.complaints(f"{CONNECTED}\nINFO nothing to see\n{PREFIX}{line}\n{PREFIX}{line}\n")
    assert [(each.check, each.level) for each in found] == [("engine log", level)]
    assert "(2 lines): " in found[0].text and found[0].fix


def test_every_pattern_is_in_the_connector() -> None:
    """A log line that changes its words must not make its check blind."""
    root = Path(__file__).resolve().parents[3] / "vllm_plugin"
    code = "\n".join(path.read_text() for path in sorted(root.rglob("*.py"))).replace('"\n', "").replace("%d", "7")
    code = " ".join("".join(piece.lstrip(' "') if nth else piece for nth, piece in enumerate(code.split("\n"))).split())
    for words in (
        "kvpool is off for this engine", "KV sharing is off for this engine until", "failed with an unexpected error",
        "raise ConfigError(", "kv_load_failure_policy is ", "of which nothing can be read in",
        "a load of 7 KV blocks failed", "KV blocks were not stored in the pool", "KV blocks of a load left the pool",
        "whose connector interface may differ", "identifies them by that name and revision", "kvpool is away: ",
        "another connector has replaced that of", "KV sharing is off until the engine's blocks",
    ):  # fmt: skip
        assert words in code, words


def test_a_server_that_is_still_away_is_an_error() -> None:
    (found,) = engine.complaints("\n".join([CONNECTED, AWAY, AWAY]))
    assert found.level is Level.ERROR and found.text.startswith("the server was away 2 times, and is still: ")
    assert "cannot reach kvpool-server at h:1" in found.text
    (found,) = engine.complaints("\n".join([AWAY, CONNECTED]))
    assert found.level is Level.WARNING


def test_a_log_without_the_connector_is_a_warning() -> None:
    (found,) = engine.complaints("INFO hello\n")
    assert found.level is Level.WARNING and "says nothing" in found.text


def test_a_long_log_is_read_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "HEAD_BYTES", 2_000)
    monkeypatch.setattr(engine, "TAIL_BYTES", 2_000)
    path = tmp_path / "engine.log"
    path.write_text(f"{ARGUMENTS}\n{CONNECTED}\n" + "INFO noise\n" * 10_000 + f"{AWAY}\n")
    assert len(engine.read_log(path)) == 4_000
    assert levels(engine.log_file(path)) == {"engine log": Level.ERROR}


def test_a_log_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none: No such file"):
        engine.log_file(tmp_path / "none")


def test_hostile_lines_are_cut_and_escaped() -> None:
    (found,) = engine.complaints(f"kvpool is off for this engine: \x1b[2J[red]{'x' * 10_000}\n")
    assert found.text.isprintable() and len(found.text) < 500


@pytest.mark.parametrize("part", ["kvpool at ", "a load of 1", "kvpool, namespace 0"])
def test_a_log_of_whatever_lines_is_read_in_time_that_grows_with_its_size(part: str) -> None:
    line = "kvpool " + part * (200_000 // len(part))
    lines = "\n".join([line[: engine.MAX_MATCHED_CHARS]] * 200)
    started = time.process_time()
    engine.complaints(line)
    engine.complaints(lines)
    assert time.process_time() - started < 1


def test_settings_are_read_in_time_that_grows_with_the_size_of_their_line() -> None:
    for part in ("prefix_caching_hash_algo", "kv_connector'", " "):
        line = "non-default args: 'prefix_caching_hash_algo'" + part * (1_000_000 // len(part))
        started = time.process_time()
        engine.of_log(line)
        assert time.process_time() - started < 1


def test_a_second_connection_is_found_behind_the_same_words() -> None:
    assert engine.complaints(f"{PREFIX}kvpool at kvpool at {CONNECTED}")[0].level is Level.OK
