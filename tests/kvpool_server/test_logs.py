"""A log stream that is asked for as JSON is JSON from its first line to its last."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool import Client, ClientConfig
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tokens import create_token
from kvpool_server.process.logs import MAX_CHARS, MAX_EVENTS, MAX_FIELDS, LogEvents, wants_json
from testbed.ports import free_endpoint
from tests.conftest import StartServer
from tests.support.certificates import DAY
from tests.support.processes import run_command, run_server, unread_pipe, wait_for
from tests.support.values import group_spec, namespace_spec
from tests.support.workers import workers_of

JSON = ("--log-format", "json")
NO_PORTS = ("--http-listen", "", "--data-listen", "")
NOWHERE = ("--listen", "127.0.0.1:0", "--http-listen", "")


def _records(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    assert all({"event", "level", "timestamp"} <= set(record) for record in found)
    return found


def test_from_the_first_line_to_the_last(pool_server: StartServer, tmp_path: Path) -> None:
    server = pool_server(
        *JSON, "--tier", f"file:{tmp_path},size=64MiB,name=one", environment={"KVPOOL_LOG_LEVEL": "debug"}
    )
    (worker,) = workers_of(server)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: "a data worker died" in server.stderr, "the log tells of it")
    server.terminate()
    assert server.wait() == 0
    assert server.stdout == ""
    said = _records(server.stderr)
    events = [record["event"] for record in said]
    assert events[-1] == "stopped" and "tier opened" in events
    (ready,) = (record for record in said if record["event"] == "ready")
    assert ready["kv_transfer_config"]["kv_connector_extra_config"] == {"endpoint": server.endpoint}


@pytest.mark.parametrize(("log_format", "has_reader"), [("json", False), ("console", False), ("console", True)])
def test_a_call_does_not_fail_because_nobody_reads_the_log(log_format: str, has_reader: bool) -> None:
    endpoint = free_endpoint()
    flags = ("--listen", endpoint, *NO_PORTS, "--memory", "1MiB", "--keep", "no", "--log-format", log_format)
    command = [sys.executable, "-m", "kvpool_server", *flags]
    with unread_pipe(has_reader) as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            with grpc.insecure_channel(endpoint) as channel:  # A server tries its ports before it serves them.
                grpc.channel_ready_future(channel).result(60)
            with Client(ClientConfig(endpoint, timeout_ms=30_000)) as client:
                client.open_namespace(namespace_spec(group_spec()))  # Which the server logs.
            server.terminate()
            server.wait(30)
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--unix-listen", "/no/such/socket", "--memory", "1MiB", *NOWHERE, *JSON), "/no/such/socket.memory"),
        (("--tier", "file:/no/such,size=64MiB", "--memory", "1MiB", *NOWHERE, *JSON), "/no/such does not exist"),
        (("--config", "/no/such.toml", *JSON), "config file /no/such.toml"),
        (("--config", "FILE"), "unknown key memry"),
        ((), "unknown key memry"),
    ],
)
def test_what_keeps_a_server_from_starting_is_said_as_flags_environment_or_file_want(
    flags: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text('log_format = "json"\nmemry = 1\n')
    environment = {} if flags else {"KVPOOL_CONFIG": str(file)}
    done = run_server(*(str(file) if flag == "FILE" else flag for flag in flags), **environment)
    assert done.returncode == 2 and done.stdout == ""
    assert any(says in record["event"] for record in _records(done.stderr))


WARNS = """
import logging, threading, warnings
from kvpool_server.process import logs
logs.log_as_json()
logs.configure("json", "info")
warnings.warn("by a module")
logging.getLogger("library").error("by a library")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(), thread.join()
raise RuntimeError("by the server")
"""


def test_every_way_of_python_to_standard_error() -> None:
    done = run_command(sys.executable, "-c", WARNS)
    assert done.returncode == 1
    said = json.dumps(_records(done.stderr))
    ways = ("by a module", "by a library", "ZeroDivisionError", "RuntimeError: by the server")
    assert [words for words in ways if words not in said] == []


NAMES = """
import logging, structlog
from kvpool_server.process import logs
logs.configure("console", "info")
log, name = structlog.get_logger(), "evil\\x1b[2J\\n2026-01-01 [error] forged\\u202e"
log.warning(name, model=name, bare="\\x1b[31m", names=[name])
logging.getLogger("library").error("cannot read %s", name)
try:
    raise ValueError(name)
except ValueError:
    log.exception("failed")
    logging.getLogger("library").exception("failed")
"""


def test_names_that_clients_chose_neither_begin_lines_nor_move_the_cursor() -> None:
    done = run_command(sys.executable, "-c", NAMES)
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and all(line.isprintable() for line in lines)
    assert sum("Traceback" in line for line in lines) == 2 and done.stderr.count("forged") >= 6
    assert not any(line.startswith("2026-01-01") for line in lines)
    begun = [line for line in lines if line[:1].isdigit()]
    assert len(begun) == 4, "one line for each event"
    assert "model='evil\\\\x1b" in begun[0] or "evil\\x1b[2J\\n" in begun[0]


@pytest.mark.parametrize(
    ("arguments", "environment", "wanted"),
    [
        (["--log-format=json"], "console", True),
        (["--log-format=json", "--log-format", "console"], "json", False),
        ([], "json", True),
        (["--log-format"], "", False),
        (["--config", "/no/such"], "", False),
    ],
)
def test_the_format_is_known_before_the_settings_are(arguments: list[str], environment: str, wanted: bool) -> None:
    assert wants_json(arguments, {"KVPOOL_LOG_FORMAT": environment}) is wanted


def _logged(**fields: object) -> str:
    """All that is shown of an event with these fields."""
    events = LogEvents()
    events.record(None, "warning", {"event": "it happened", **fields})
    (event,) = events.latest()
    return repr((event.text, event.fields))


def test_only_warnings_and_errors_are_kept_the_newest_first_and_repeated_ones_are_counted() -> None:
    times = iter(range(10))
    events = LogEvents(lambda: next(times))
    for level in ("debug", "info", "warning", "error", "error", "critical", "exception"):
        given = {"event": level}
        assert events.record(None, level, given) is given
    logger = logging.getLogger("kvpool.test_log_events")
    logger.addHandler(events)
    try:
        logger.info("no")
        logger.warning("yes, %s", "indeed")
    finally:
        logger.removeHandler(events)
    assert [(event.level, event.text, event.count, event.at) for event in events.latest()] == [
        ("warning", "yes, indeed", 1, 5),
        ("error", "exception", 1, 4),
        ("error", "critical", 1, 3),
        ("error", "error", 2, 2),
        ("warning", "warning", 1, 0),
    ]


def test_events_are_few_and_short() -> None:
    events = LogEvents()
    for nth in range(3 * MAX_EVENTS):
        events.add("warning", f"{nth} " + "long " * 1_000, {f"name{each}": "long " * 1_000 for each in range(50)})
    kept = events.latest()
    assert len(kept) == MAX_EVENTS and kept[0].text.startswith(str(3 * MAX_EVENTS - 1))
    assert all(len(event.text) <= MAX_CHARS and len(event.fields) == MAX_FIELDS for event in kept)
    assert all(len(value) <= MAX_CHARS for event in kept for _, value in event.fields)


TOKEN = create_token(Principal(ALL_TENANTS, Role.METRICS), DAY)[0]
JWT = "eyJhbGciOiJFUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJl"


@pytest.mark.parametrize("text", ["{}", "[Errno 13] Permission denied: '{}'", "key={};", "see {}, please", "({})"])
def test_secrets_and_paths_are_not_shown_and_what_an_operator_needs_is(text: str) -> None:
    random_texts = (secrets.token_hex(32), secrets.token_urlsafe(32))
    for value in (TOKEN, JWT, *random_texts, "/etc/kvpool/pki/server/tls.key", "~/.kvpool/token", "/secret"):
        told = text.format(value)
        for shown in (_logged(error=told), _logged(event=told), _logged(why=[told])):
            assert value not in shown and value.rpartition("/")[2] not in shown
    for name in ("path", "paths", "key", "token_file", "salt", "name_key", "directory", "exc_info"):
        assert "hidden" not in _logged(**{name: "hidden"})
    shown = _logged(tier="file", error="503 of https://issuer.example/keys", seconds=2.0, why="no space left on device")
    for part in ("it happened", "file", "503", "issuer.example", "2.0", "no space left on device"):
        assert part in shown
