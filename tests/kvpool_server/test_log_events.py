"""The log's last warnings and errors: few, short, without secrets."""

from __future__ import annotations

import logging
import secrets
import threading

import pytest
import structlog

from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tokens import create_token
from kvpool_server.process.log_events import MAX_CHARS, MAX_EVENTS, MAX_FIELDS, LogEvents
from tests.support.certificates import DAY


def _logged(**fields: object) -> str:
    """All that is shown of an event with these fields."""
    events = LogEvents()
    events.record(None, "warning", {"event": "it happened", **fields})
    (event,) = events.latest()
    return repr((event.text, event.fields))


def test_only_warnings_and_errors_are_kept_the_newest_first() -> None:
    events = LogEvents()
    for nth, level in enumerate(("debug", "info", "warning", "error", "critical", "exception")):
        given = {"event": f"event {nth}"}
        assert events.record(None, level, given) is given
    kept = [(event.level, event.text) for event in events.latest()]
    assert kept == [("error", "event 5"), ("error", "event 4"), ("error", "event 3"), ("warning", "event 2")]


def test_events_are_few_and_short() -> None:
    events = LogEvents()
    for nth in range(3 * MAX_EVENTS):
        events.add("warning", f"{nth} " + "long " * 1_000, {f"name{each}": "long " * 1_000 for each in range(50)})
    kept = events.latest()
    assert len(kept) == MAX_EVENTS and kept[0].text.startswith(str(3 * MAX_EVENTS - 1))
    assert all(len(event.text) <= MAX_CHARS and len(event.fields) == MAX_FIELDS for event in kept)
    assert all(len(value) <= MAX_CHARS for event in kept for _, value in event.fields)


def test_an_event_that_repeats_is_counted() -> None:
    times = iter(range(10))
    events = LogEvents(lambda: next(times))
    for tier in ("one", "one", "one", "two"):
        events.add("error", "a tier has failed", {"tier": tier})
    assert [(event.count, event.at) for event in events.latest()] == [(1, 3), (3, 2)]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(create_token(Principal(ALL_TENANTS, Role.METRICS), DAY)[0], id="token"),
        pytest.param(secrets.token_hex(32), id="hexadecimal"),
        pytest.param(secrets.token_urlsafe(32), id="base64"),
        "eyJhbGciOiJFUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJl",
        "/etc/kvpool/pki/server/tls.key",
        "~/.kvpool/token",
        "/secret",
    ],
)
@pytest.mark.parametrize("text", ["{}", "[Errno 13] Permission denied: '{}'", "key={};", "see {}, please", "({})"])
def test_secrets_and_paths_are_not_shown(value: str, text: str) -> None:
    for shown in (
        _logged(error=text.format(value)),
        _logged(event=text.format(value)),
        _logged(why=[text.format(value)]),
    ):
        assert value not in shown and value.rpartition("/")[2] not in shown


@pytest.mark.parametrize("name", ["path", "paths", "key", "token_file", "salt", "name_key", "directory", "exc_info"])
def test_fields_that_name_secrets_are_left_out(name: str) -> None:
    assert "hidden" not in _logged(**{name: "hidden"})


def test_what_an_operator_needs_stays() -> None:
    shown = _logged(tier="file", error="503 of https://issuer.example/keys", seconds=2.0, why="no space left on device")
    for part in ("it happened", "file", "503", "issuer.example", "2.0", "no space left on device"):
        assert part in shown


def test_loggers_of_libraries_are_heard() -> None:
    events = LogEvents()
    logger = logging.getLogger("kvpool.test_log_events")
    logger.addHandler(events)
    try:
        logger.info("no")
        logger.warning("yes, %s", "indeed")
    finally:
        logger.removeHandler(events)
    assert [(event.level, event.text) for event in events.latest()] == [("warning", "yes, indeed")]


def test_any_thread_may_log() -> None:
    events = LogEvents()
    log = structlog.wrap_logger(structlog.testing.CapturingLogger(), processors=[events.record])
    threads = [threading.Thread(target=lambda: [log.warning("said") for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(event.count for event in events.latest()) == 800
