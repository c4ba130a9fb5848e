"""`kvpool doctor`: what it prints, how it ends, and what becomes of checks that hang or fail."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable

from typer.testing import CliRunner, Result

from kvpool.cli import app
from kvpool.client.client import Client
from kvpool.commands.doctor import examine
from kvpool.protocol.errors import PermissionDeniedError, UnavailableError
from kvpool.report.judgements import Finding, Level, error, ok
from tests.conftest import StartServer
from tests.support.processes import ServerProcess
from tests.support.values import group_spec, namespace_spec, payload, run_of

NOBODY = "127.0.0.1:1"


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def at(server: ServerProcess, *arguments: str) -> Result:
    return doctor("--endpoint", server.endpoint, "--http", server.http_url.removeprefix("http://"), *arguments)


def test_a_pool_in_order_ends_with_0(pool_server: StartServer, connect: Callable[..., Client]) -> None:
    server = pool_server("--memory", "64MiB")
    client = connect(server)
    for dtype in ("auto", "fp8"):
        client.open_namespace(namespace_spec(group_spec(chunk_bytes=1 << 20), salt="", kv_cache_dtype=dtype))
    done = doctor("--endpoint", server.endpoint, "--bandwidth")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("ok      gRPC: kvpool-server at ")
    assert re.fullmatch(r"0 errors, (1 warning|(0|\d*[2-9]) warnings)(, 1 note|, \d+ notes)?, \d+ ok", lines[-1])
    assert not any(line.startswith("ERROR") for line in lines)
    checks = {line[8:].partition(":")[0] for line in lines[:-1] if not line.startswith("        ")}
    assert checks >= {
        "gRPC", "versions", "transport", "network", "HTTP", "corruption", "memory", "loop lag", "bandwidth",
        "hits", "clock", "namespaces", "NUMA", "memlock", "memory of the host", "huge pages", "open files",
    }  # fmt: skip
    assert "/healthz says 'ok'" in done.output and "GB/s" in done.output
    assert "because of kv_cache_dtype alone: '" in done.output
    assert "the arena holds 1,024 tokens of test/model at most, with blocks of 1 MiB" in done.output


def test_a_server_that_is_away_is_one_finding_and_the_host_is_still_checked() -> None:
    done = doctor("--endpoint", NOBODY, "--json")
    assert done.exit_code == 1
    found = json.loads(done.output)
    assert found["endpoint"] == NOBODY and found["errors"] == 1
    (away,) = (each for each in found["findings"] if each["level"] == "error")
    assert away["check"] == "gRPC" and "cannot reach kvpool-server" in away["text"] and away["fix"]
    checks = {each["check"] for each in found["findings"]}
    assert checks >= {"memory of the host", "huge pages", "open files", "memlock"}


def test_a_server_that_drains_is_an_error_without_http_too(
    pool_server: StartServer, connect: Callable[..., Client]
) -> None:
    server = pool_server("--http-listen", "", "--drain-ms", "60000")
    client = connect(server)
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1_000)))
    client.put_blocks(namespace, run_of("a"), [payload("a", 1_000)])
    lease_id = client.lookup(namespace, [run_of("a")]).lease_id  # Keeps the server from stopping.
    client.admin.drain()
    done = doctor("--endpoint", server.endpoint, "--json")
    findings = json.loads(done.output)["findings"]
    (found,) = (each for each in findings if each["level"] == "error")
    assert done.exit_code == 1 and found["check"] == "drain" and "drains: it takes no new lookups" in found["text"]
    (found,) = (each for each in findings if each["check"] == "HTTP")
    assert found["level"] == "info" and "the server tells no HTTP port" in found["text"]
    client.release([lease_id])


def test_a_wrong_option_is_refused_before_anything_is_checked() -> None:
    done = doctor("--http", "nowhere")
    assert done.exit_code == 1 and "is not HOST:PORT" in str(done.exception)
    assert doctor("--nonsense").exit_code == 2


def test_hostile_names_reach_no_terminal(pool_server: StartServer, connect: Callable[..., Client]) -> None:
    server = pool_server()
    client = connect(server)
    for dtype in ("\x1b[2J[/bold]", "b\n"):
        namespace = client.open_namespace(
            namespace_spec(group_spec(chunk_bytes=1_000), salt="", model="[/x]\x1b[2J\nforged", kv_cache_dtype=dtype)
        )
        client.put_blocks(namespace, run_of("a"), [payload("a", 1_000)])
        client.lookup(namespace, [run_of("a")])
    http = server.http_url.removeprefix("http://")
    for command in (["doctor", "--http", http], ["stats"], ["namespaces"], ["top", "--once", "--interval", "0.1"]):
        done = CliRunner().invoke(app, [*command, "--endpoint", server.endpoint])
        assert done.exit_code == 0, (command, done.output, done.exception)
        assert "\x1b" not in done.output and "\nforged" not in done.output
        assert "[/x]" in done.output or command == ["stats"]


def test_checks_run_beside_each_other_and_one_that_hangs_is_a_finding_and_delays_nothing() -> None:
    release, second_began, began = threading.Event(), threading.Event(), time.monotonic()

    def slow() -> list[Finding]:
        second_began.wait(10)  # It ends only if the second check runs beside it.
        return [ok("first", "a")]

    def quick() -> list[Finding]:
        second_began.set()
        return [error("second", "b", "c")]

    try:
        hanging = {f"hangs {nth}": lambda: release.wait(60) and [] for nth in range(3)}
        found = examine({"first": slow, "second": quick, **hanging}, deadline_s=2.0)  # type: ignore[dict-item]
    finally:
        release.set()
    assert time.monotonic() - began < 30
    hung = [(f"hangs {nth}", Level.WARNING) for nth in range(3)]
    assert [(each.check, each.level) for each in found] == [("first", Level.OK), ("second", Level.ERROR), *hung]
    assert found[2].text == "the check did not end within 2 s"


def test_what_a_check_raises_is_a_finding() -> None:
    def failing(error: Exception) -> Callable[[], list[Finding]]:
        def check() -> list[Finding]:
            raise error

        return check

    cases = [UnavailableError("away"), PermissionDeniedError("not yours"), ZeroDivisionError("oops")]
    found = examine({str(each): failing(each) for each in cases})
    assert [each.level for each in found] == [Level.ERROR, Level.WARNING, Level.WARNING]
    assert found[0].text == "away" and "operator's certificate" in found[1].fix and "oops" in found[2].text
