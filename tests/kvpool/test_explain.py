"""`kvpool explain` on a real server: sentences, table, JSON, and errors that name the fix."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client.client import Client, Namespace
from kvpool.commands.explain import PromptReport
from kvpool.commands.prompts import hash_seed, prompt_runs, read_tokens
from kvpool.protocol.errors import ConfigError, InvalidRequestError
from kvpool.protocol.hashing import block_hashes
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun
from kvpool.security.name_key import NameKey
from kvpool.v1 import pool_pb2 as pb
from tests.conftest import Connect
from tests.kvpool.conftest import Cli, CliAt
from tests.support.processes import ServerProcess
from tests.support.values import group_spec, namespace_spec, payload

MIB = 1 << 20
SEED = "seed of the engines"
TOKENS = list(range(1_000, 1_203))
"""12 blocks, and 11 tokens more."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    of_16_blocks = ServerProcess(tmp_path_factory.mktemp("explain"), "--memory", "16MiB")
    yield of_16_blocks
    of_16_blocks.stop()


@pytest.fixture
def cli(server: ServerProcess, cli_at: CliAt, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("COLUMNS", "300")  # No output depends on it.
    return cli_at(server)


@pytest.fixture
def client(server: ServerProcess, connect: Connect) -> Client:
    """A client of the server, which is empty."""
    client = connect(server)
    client.admin.clear()
    return client


def spec(**fields: object) -> NamespaceSpec:
    group = group_spec(chunk_bytes=MIB)
    return namespace_spec(group, hash_seed=SEED, hash_block_tokens=16, **{"salt": "s", **fields})


def store(client: Client, namespace: Namespace, tokens: list[int]) -> None:
    run = BlockRun(0, block_hashes(tokens, 16, seed=SEED))
    client.put_blocks(namespace, run, [payload(each, MIB) for each in run.block_hashes])


def test_a_prompt_that_was_evicted_in_part_is_explained(cli: Cli, client: Client, tmp_path: Path) -> None:
    mine, other = client.open_namespace(spec()), client.open_namespace(spec(tenant="b", model="big/model"))
    (tmp_path / "prompt.json").write_text(json.dumps([*TOKENS, *range(40)]))
    asked = ("explain", "--prompt", str(tmp_path / "prompt.json"), "--namespace", mine.fingerprint.hex()[:12])
    asked += ("--hash-seed", SEED)
    store(client, mine, TOKENS)
    assert cli(*asked).startswith("192 of 243 tokens are stored (79%). An engine would load 192 and compute 51.")
    store(client, other, list(range(9 * 16)))  # Takes the room of 5 blocks.
    printed = cli(*asked)
    assert printed.startswith("112 of 243 tokens are stored (46%). An engine would load 112 and compute 131.\n")
    evicted = (
        r"Tokens 112 to 192 were evicted \d+ s( to \d+ s)? ago, \d+ s after their last use, to make room for tenant b "
    )
    assert re.search(evicted, printed)
    assert "(model big/model)." in printed
    assert "Tokens 192 to 240 were never stored.\n" in printed
    assert "Another stored prompt has" not in printed and "knows no block of this prompt" not in printed
    assert "The last 3 tokens are always computed" in printed
    assert "The server's record of blocks that left the pool begins " in printed
    table = printed.partition("┏")[2]
    assert table and all(len(line) <= 80 for line in table.splitlines())
    found = json.loads(cli(*asked, "--json"))
    assert (found["stored_tokens"], found["loadable_tokens"], found["num_tokens"]) == (112, 112, 243)
    (group,) = found["groups"]
    assert [(part["start"], part["stop"], part["state"], part["cause"]) for part in group["ranges"]] == [
        (0, 112, "complete", None),
        (112, 192, "missing", "evicted"),
        (192, 240, "missing", "never_stored"),
    ]
    assert group["ranges"][1]["evicted_for"] == {"tenant": "b", "model": "big/model", "is_hidden": False}


def question(namespace: Namespace, tmp_path: Path) -> tuple[str, ...]:
    """The command that asks about `TOKENS` in a namespace."""
    (tmp_path / "prompt").write_text(" ".join(map(str, TOKENS)))
    given = ("--prompt", str(tmp_path / "prompt"), "--namespace", namespace.fingerprint.hex(), "--hash-seed", SEED)
    return ("explain", *given)


@pytest.mark.parametrize(
    ("kind", "loadable"),
    [("full_attention", 32), ("mla_attention", 32), ("mamba", 80), ("chunked_local_attention", 80)],
)
def test_only_states_and_chunks_are_loaded_over_a_hole(kind: str, loadable: int) -> None:
    states = (pb.BLOCK_STATE_COMPLETE, 0, 2), (pb.BLOCK_STATE_MISSING, 2, 1), (pb.BLOCK_STATE_COMPLETE, 3, 2)
    ranges = [pb.BlockRange(first=first, count=count, state=state) for state, first, count in states]
    found = pb.ExplainResponse(runs=[pb.RunExplanation(group_idx=0, ranges=ranges)])
    report = PromptReport(namespace_spec(group_spec(block_tokens=16, kind=kind)), 5 * 16 + 1, found)
    assert report.loadable == loadable


def test_servers_that_hold_blocks_or_give_no_answer_are_named() -> None:
    held = pb.BlockRange(count=2, state=pb.BLOCK_STATE_IN_TIER, tier="peers", server="h:1")
    run = pb.RunExplanation(group_idx=0, ranges=[held, pb.BlockRange(first=2, count=3, state=pb.BLOCK_STATE_MISSING)])
    found = pb.ExplainResponse(runs=[run], tiers_away=["peers"], servers_away={"h:2": "refused: busy"})
    report = PromptReport(namespace_spec(group_spec(block_tokens=16)), 5 * 16 + 1, found)
    told = "\n".join(report.sentences())
    assert "Tokens 0 to 32 are only in tier peers, held by h:1: a request waits" in told
    assert "h:2 gave no answer about these blocks: refused: busy." in told
    assert [row[2] for row in report.rows()] == ["peers h:1", "missing"]
    row = report.as_json()
    assert row["servers_away"] == {"h:2": "refused: busy"}
    assert [part["server"] for part in row["groups"][0]["ranges"]] == ["h:1", None]


def test_blocks_in_another_namespace_and_under_other_names_are_told(cli: Cli, client: Client, tmp_path: Path) -> None:
    old, new = client.open_namespace(spec(weights_epoch="1")), client.open_namespace(spec(weights_epoch="2"))
    store(client, old, TOKENS)
    asked = question(new, tmp_path)
    printed = cli(*asked)
    assert printed.startswith("0 of 203 tokens are stored (0%).")
    where = f"Namespace {old.fingerprint.hex()[:12]} has 12 blocks of this prompt, from the first missing block on."
    assert where in printed
    assert "The namespace differs in: weights_epoch: '2' here, '1' there." in printed
    other = client.open_namespace(spec(model="other"))
    assert "differs in" not in cli(*question(other, tmp_path)), "another model's namespace is no hint"
    store(client, new, TOKENS)
    sentence = (
        "The server knows no block of this prompt. If an engine has stored it, its blocks have other names: check the "
        "tokenizer, hash seed, cache salt and LoRA adapter."
    )
    assert sentence in cli(*asked, "--cache-salt", "wrong")
    assert sentence not in cli(*asked)


def test_errors_name_the_fix(cli: Cli, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # Takes seconds to import.
    namespace = client.open_namespace(spec()).fingerprint.hex()
    text = tmp_path / "text"
    text.write_text("Once upon a time")
    short = tmp_path / "short"
    short.write_text("1 2 3")

    def error(*arguments: str) -> str:
        return " ".join(cli.fails("explain", *arguments, status=2)[1].split())

    assert "give --tokenizer DIR for text" in error("--prompt", str(text), "--namespace", namespace)
    assert "set --hash-seed to the PYTHONHASHSEED of its engines" in error(
        "--prompt", str(short), "--namespace", namespace
    )
    seeded = ("--namespace", namespace, "--hash-seed", SEED)
    assert "3 tokens, less than a block of 16" in error("--prompt", str(short), *seeded)
    assert "cannot read the prompt" in error("--prompt", str(tmp_path / "none"), *seeded)
    assert "cannot load the tokenizer" in error("--prompt", str(text), *seeded, "--tokenizer", str(tmp_path))


@pytest.mark.parametrize("package", ["tokenizers", pytest.param("transformers", marks=pytest.mark.more)])
def test_text_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    if package == "tokenizers":
        monkeypatch.setitem(sys.modules, "transformers", None)
    words = {"[UNK]": 0, "once": 1, "upon": 2}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (tmp_path / "text").write_text("once upon upon")
    assert read_tokens(str(tmp_path / "text"), str(tmp_path)) == [1, 2, 2]


def test_a_tokenizer_that_cannot_be_loaded_is_an_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("once")
    monkeypatch.setitem(sys.modules, "transformers", _Transformers(AttributeError("no vocab\x1b[2J")))
    with pytest.raises(InvalidRequestError, match=r"cannot load the tokenizer org/name: .*no vocab\\x1b\[2J"):
        read_tokens(str(tmp_path / "text"), "org/name")
    for name in ("./tokenizer", "~/tokenizer", "/none/tokenizer", "a/b/c", "tokenizer/"):
        with pytest.raises(ConfigError, match="is neither a directory nor a file"):
            read_tokens(str(tmp_path / "text"), name)
    for package in ("transformers", "tokenizers"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Exception, match="install one"):
        read_tokens(str(tmp_path / "text"), "somewhere")


class _Transformers:
    """Records how a tokenizer is asked for, and fails as packages do."""

    def __init__(self, error: Exception | None = None):
        self.AutoTokenizer = self
        self.asked: list[tuple[str, dict[str, object]]] = []
        self._error = error

    def from_pretrained(self, name: str, **options: object) -> _Transformers:
        self.asked.append((name, options))
        if self._error is not None:
            raise self._error
        return self

    def encode(self, text: str) -> list[int]:
        return [len(text)]


def test_no_code_of_a_tokenizer_is_run_and_nothing_is_fetched_for_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("once")
    monkeypatch.setitem(sys.modules, "transformers", package := _Transformers())
    assert read_tokens(str(tmp_path / "text"), str(tmp_path)) == [4]
    assert read_tokens(str(tmp_path / "text"), "org/name") == [4]
    assert package.asked == [
        (str(tmp_path), {"trust_remote_code": False, "local_files_only": True}),
        ("org/name", {"trust_remote_code": False, "local_files_only": False}),
    ]


def test_names_depend_on_salt_group_key_and_seed() -> None:
    groups = group_spec(block_tokens=16), group_spec(block_tokens=32, kind="sliding_window")
    two = namespace_spec(*groups, hash_seed=SEED, hash_block_tokens=16)
    small, large = prompt_runs(two.listed(), TOKENS, seed=SEED)
    assert small.block_hashes == block_hashes(TOKENS, 16, seed=SEED)
    assert large.block_hashes == small.block_hashes[1::2]
    salted, _ = prompt_runs(two, TOKENS, seed=SEED, cache_salt="x")
    assert salted.block_hashes == block_hashes(TOKENS, 16, seed=SEED, extra_keys=[(("cache_salt", "x"),)])
    key = NameKey(bytes(32))
    keyed = namespace_spec(groups[0], extra=(("name_key", key.digest),))
    (run,) = prompt_runs(keyed, TOKENS, seed="", key=key)
    assert run.block_hashes == [key.name(name) for name in block_hashes(TOKENS, 16, seed="")]
    with pytest.raises(InvalidRequestError, match="has no key"):
        prompt_runs(keyed, TOKENS, seed="")
    with pytest.raises(InvalidRequestError, match="algorithm 'sha256'"):
        prompt_runs(namespace_spec(hash_algorithm="sha256"), TOKENS, seed="")


def test_usual_seeds_are_found_and_a_namespace_without_one_takes_any(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hash_seed(namespace_spec(hash_seed="vllm-none-hash").listed()) == "vllm-none-hash"
    monkeypatch.setenv("PYTHONHASHSEED", "77")
    assert hash_seed(namespace_spec(hash_seed="77").listed()) == "77"
    with pytest.raises(InvalidRequestError, match="--hash-seed"):
        hash_seed(namespace_spec(hash_seed="77").listed(), "78")
    without = namespace_spec(hash_seed="").listed()
    assert hash_seed(without) == "vllm-none-hash"
    assert [hash_seed(without, seed) for seed in ("vllm-none-hash", "78", "")] == ["vllm-none-hash", "78", ""]
