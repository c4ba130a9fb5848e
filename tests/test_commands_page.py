"""docs/reference/commands.md has every command, and every field of its JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.client.client import Client
from kvpool.commands.common import ExitStatus
from kvpool.commands.stats import row_of
from kvpool.doctor.judgements import judgements
from kvpool.security.certificates import Authority
from kvpool.v1 import pool_pb2 as pb
from tests.conftest import StartServer
from tests.support.values import group_spec, namespace_spec, payload, run_of

PAGE = (Path(__file__).parent.parent / "docs" / "reference" / "commands.md").read_text()
MAPS = {"counters", "computed_tokens"}
"""Fields whose own keys are names of metrics or causes, which other pages list."""


def _section(command: str) -> str:
    _, heading, rest = PAGE.partition(f"\n## {command}\n")
    assert heading, f"docs/reference/commands.md has no section {command!r}"
    return rest.split("\n## ", 1)[0]


def _names() -> set[str]:
    command: Any = typer.main.get_command(app)
    return {*command.commands, "tier"}


def test_every_command_has_a_section_and_a_row() -> None:
    table = PAGE.partition("\n## ")[0]
    for name in _names():
        assert _section(name).strip(), name
        assert f"[`{name}`](#{name})" in table, name


def test_there_is_no_section_of_a_command_that_is_none() -> None:
    sections = set(re.findall(r"^## (\S+)$", PAGE, re.MULTILINE))
    assert sections - {"JSON"} == _names()


def test_every_option_that_asks_for_json_is_documented() -> None:
    """A command with --json has a section with a table of fields, or says that it has none."""
    command: Any = typer.main.get_command(app)
    for name, each in command.commands.items():
        inner = getattr(each, "commands", {}).values() or [each]
        section = _section(SAME_JSON.get(name, name))
        if any("--json" in parameter.opts for one in inner for parameter in one.params):
            assert "| field" in section or name in ELSEWHERE, name


ELSEWHERE = {"explain", "value", "ledger"}
"""Commands whose JSON other pages describe."""
SAME_JSON = {"expire": "pin", "prefetch": "pin"}
"""Commands whose JSON is that of another one."""


@pytest.mark.parametrize("status", ExitStatus)
def test_every_exit_status_is_documented(status: ExitStatus) -> None:
    assert f"| {status.value} | " in _section("Exit statuses")


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _keys(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            if key not in MAPS and key != "extra":
                yield from _keys(each)


def _check(command: str, text: str) -> set[str]:
    """Fails if the section of a command lacks a field of its JSON; returns the fields."""
    keys = set(_keys(json.loads(text)))
    section = _section(command)
    missing = {key for key in keys if f"`{key}`" not in section}
    assert keys and not missing, f"docs/reference/commands.md, section {command}, lacks {sorted(missing)}"
    return keys


def test_every_field_of_a_servers_answers_is_documented(
    pool_server: StartServer, connect: Callable[..., Client], tmp_path: Path
) -> None:
    server = pool_server("--memory", "64MiB", "--quota", "tenant:t=1MiB", "--tier", f"file:{tmp_path},size=64MiB")
    client = connect(server)
    for dtype in ("auto", "fp8"):
        spec = namespace_spec(group_spec(chunk_bytes=1_000), tenant="t", salt="", kv_cache_dtype=dtype)
        namespace = client.open_namespace(spec)
        client.put_blocks(namespace, run_of("a"), [payload("a", 1_000)])
        client.lookup(namespace, [run_of("a", "b")])
    name = namespace.fingerprint.hex()

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments, "--endpoint", server.endpoint, "--json"])
        assert done.exit_code == 0, (arguments, done.output, done.exception)
        return done.stdout

    measured = ["--bandwidth", "--mib", "1", "--namespace", name, "--prefill", "1000"]
    assert _check("ping", run("ping", *measured)) >= {"hit", "saved_ms", "version"}
    _check("whoami", run("whoami"))
    assert _check("stats", run("stats")) >= {"p99_seconds", "held_bytes", "problems", "tiers"}
    assert _check("namespaces", run("namespaces")) >= {"groups", "quotas", "limit_bytes", "tiers"} - {"limit_bytes"}
    both = [each.fingerprint.hex() for each in client.admin.namespaces(holdings=False)][:2]
    assert _check("namespaces", run("namespaces", "--diff", *both)) == {"field", "a", "b"}
    _check("quota", run("quota"))
    (tmp_path / "prompt").write_text("1 " * 16)
    for hint in ("pin", "expire", "prefetch"):
        named = ("--prompt", str(tmp_path / "prompt"), "--namespace", name)
        assert _check("pin", run(hint, *named)) == {"num_blocks", "num_refused", "num_pending"}
    assert _check("doctor", run("doctor")) >= {"findings", "level", "fix"}


def test_fields_that_a_small_server_does_not_tell_are_documented_too() -> None:
    engine = pb.EngineState(
        engine="h:1", version="1", vllm_version="2", transport="shm", breaker_open=False, age_seconds=1.0
    )
    stats = pb.StatsResponse(
        counters={"corrupt_blocks": 1},
        tiers=(pb.TierStats(name="file:/x", up=True),),
        engines=(engine,),
        server=pb.ServerStats(),
    )
    assert _check("stats", json.dumps(row_of(stats, judgements(stats)))) >= {"breaker_open", "fix", "used_bytes"}
    assert all(f"`{field}`" in _section("namespaces") for field in pb.TierHoldings.__slots__)


def test_every_field_of_files_commands_is_documented(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "pki")
    authority.issue_server([])
    done = CliRunner().invoke(app, ["certs", "show", str(tmp_path / "pki"), "--json"])
    _check("certs", done.stdout)
    tokens = str(tmp_path / "tokens")
    done = CliRunner().invoke(app, ["token", "create", "--role", "operator", "--file", tokens])
    assert done.exit_code == 0, done.output
    _check("token", CliRunner().invoke(app, ["token", "list", tokens, "--json"]).stdout)
