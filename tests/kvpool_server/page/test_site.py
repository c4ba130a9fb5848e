"""The dashboard over HTTP, without a browser: its files, its JSON, and for whom they are."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.principal import ALL_TENANTS, Principal, Role
from kvpool.tokens import create_token
from kvpool_server.history import MAX_POINTS, SPANS
from tests.conftest import Connect, StartServer
from tests.security.test_access import DAY
from tests.support.driven_pool import Driver
from tests.support.page_client import Answer, Guarded
from tests.support.processes import ServerProcess, wait_for

API = ("/api/v1/now", "/api/v1/history")


def test_the_page_and_its_files_are_served_with_a_strict_policy(shared_server: ServerProcess) -> None:
    page = Answer(shared_server.http_url, "/")
    assert page.status == 200 and page.body.startswith(b"<!doctype html>")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in page.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["img-src"] == "'self' data:"
    assert "unsafe" not in page.headers["Content-Security-Policy"]
    for answer in (
        page,
        Answer(shared_server.http_url, "/page/page.js"),
        Answer(shared_server.http_url, "/api/v1/now"),
    ):
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert "Content-Security-Policy" in answer.headers
    assert Answer(shared_server.http_url, "/api/v1/now").headers["Cache-Control"] == "no-store"
    assert Answer(shared_server.http_url, "/page/page.css").headers["Content-Type"] == "text/css; charset=utf-8"


@pytest.mark.parametrize("path", ["/", "/page/uPlot/uPlot.iife.min.js", "/api/v1/now"])
def test_answers_are_compressed_for_those_who_can_read_them(shared_server: ServerProcess, path: str) -> None:
    plain = Answer(shared_server.http_url, path)
    small = Answer(shared_server.http_url, path, Accept_Encoding="gzip, br")
    assert "Content-Encoding" not in plain.headers and small.headers["Content-Encoding"] == "gzip"
    assert len(small.body) < len(plain.body) / 2
    if path != "/api/v1/now":
        assert gzip.decompress(small.body) == plain.body
    assert plain.headers["Vary"] == small.headers["Vary"] == "Accept-Encoding"


def test_a_browsers_copy_is_not_sent_again(shared_server: ServerProcess) -> None:
    first = Answer(shared_server.http_url, "/page/page.js")
    again = Answer(shared_server.http_url, "/page/page.js", If_None_Match=first.headers["ETag"])
    assert (again.status, again.body) == (304, b"")
    assert Answer(shared_server.http_url, "/page/page.js", If_None_Match='"other"').status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page", "/page/", "/page/../http.py", "/page/%2e%2e/%2e%2e/etc/passwd", "/page//etc/passwd", "//etc/passwd",
        "/page/uPlot/../page.js", "/page/index.html", "/page/uPlot/README.md", "/../../etc/passwd", "/page/page.js/",
        "/page/page.js%00", "/api/v1", "/api/v1/now/", "/index.html",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_table(shared_server: ServerProcess, path: str) -> None:
    answer = Answer(shared_server.http_url, path)
    assert (answer.status, answer.body) == (404, b"try /, /metrics or /healthz\n")


@pytest.mark.parametrize("path", ["/", "/api/v1/now", "/metrics", "/healthz"])
def test_methods(shared_server: ServerProcess, path: str) -> None:
    got, head = Answer(shared_server.http_url, path), Answer(shared_server.http_url, path, "HEAD")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Type"] == got.headers["Content-Type"]
    if path in ("/", "/healthz"):
        assert head.headers["Content-Length"] == str(len(got.body))
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"):
        refused = Answer(shared_server.http_url, path, method)
        assert (refused.status, refused.headers["Allow"]) == (405, "GET, HEAD")


def _wrong(now: dict[str, Any]) -> list[str]:
    """What is wrong with a server, but for what a busy machine does to it."""
    return [each["text"] for each in now["findings"] if not each["text"].startswith("Loop lag")]


def test_now_is_what_stats_say(pool_server: StartServer, connect: Connect) -> None:
    server = pool_server("--quota", "tenant:acme=4MiB")
    client = connect(server)
    drivers = [Driver(client, "model/one", "acme"), Driver(client, "model/two")]
    for driver in drivers:
        for _ in range(10):
            driver.turn()
    now, stats = Answer(server.http_url, "/api/v1/now").json, client.admin.stats()
    assert now["counters"] == stats.counters and now["boot"] == f"{stats.boot_token:016x}"
    assert now["worst"] == (now["findings"][0]["level"] if now["findings"] else "ok")
    assert now["pool"]["entries"] == stats.num_entries == sum(driver.served.stored_blocks for driver in drivers)
    assert (now["pool"]["arena_bytes"], now["pool"]["free_bytes"]) == (stats.arena_bytes, stats.free_bytes)
    assert now["quotas"] == [
        {"subject": quota.subject, "limit_bytes": quota.limit_bytes, "used_bytes": quota.used_bytes}
        for quota in client.admin.quotas()
    ]
    owners = {(owner["model"], owner["tenant"]): owner for owner in now["owners"]}
    for driver, who in zip(drivers, (("model/one", "acme"), ("model/two", "")), strict=True):
        assert owners[who]["lookup_tokens"] == driver.served.looked_up_tokens
        assert owners[who]["hit_tokens"] == driver.served.hit_tokens
        assert owners[who]["held_blocks"] == driver.served.stored_blocks
    sample = {tuple(each["key"]): each["value"] for each in now["sample"]}
    assert sample["hit_tokens",] == sum(driver.served.hit_tokens for driver in drivers) > 0
    assert _wrong(now) == [] and now["health"] == "ok" and now["uptime_seconds"] > 0


def test_history_has_a_sample_from_the_start_on(shared_server: ServerProcess) -> None:
    now = Answer(shared_server.http_url, "/api/v1/now").json
    for span in SPANS:
        part = Answer(shared_server.http_url, f"/api/v1/history?span={span}").json
        assert part["boot"] == now["boot"] and 1 <= len(part["times"]) <= MAX_POINTS
        assert abs(part["times"][0] - (now["time"] - now["uptime_seconds"])) < 15 or span == "15m"
        series = {tuple(each["key"]): each["values"] for each in part["series"]}
        assert all(len(values) == len(part["times"]) for values in series.values())
        assert set(series["arena_bytes",]) == {now["pool"]["arena_bytes"]}
    assert Answer(shared_server.http_url, f"/api/v1/history?since={part['times'][-1] + 1e6}").json["times"] == []


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("history?span=2h", "span '2h' is unknown; give 15m, 1h"),
        ("history?since=yesterday", "since 'yesterday' is no time"),
        ("history?since=nan", "since 'nan' is no time"),
        ("history?since=-1", "since '-1' is no time"),
        ("history?since=1e300", "since '1e300' is no time"),
        ("history?span=1h&span=6h", "given twice"),
        ("history?points=1000000", "parameter 'points' is unknown; give span and since"),
        ("now?all=1", "parameter 'all' is unknown; give none"),
        ("history?span=" + "x" * 500, "the query has 505 characters; give at most 200"),
    ],
)
def test_a_query_that_is_wrong_gets_a_sentence(shared_server: ServerProcess, query: str, says: str) -> None:
    answer = Answer(shared_server.http_url, f"/api/v1/{query}")
    assert answer.status == 400 and says in answer.json["error"]


def test_numbers_are_for_those_who_may_read_metrics(pool_server: StartServer, tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, pool_server)
    for path in ("/", "/page/page.js", "/healthz"):
        assert guarded.get(path).status == 200
    for path in API:
        stranger = guarded.get(path)
        assert (stranger.status, stranger.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert guarded.get(path, token=create_token(Principal(ALL_TENANTS, Role.METRICS), DAY)[0]).status == 401
        assert [role for role in Role if guarded.get(path, role).status == 200] == [Role.OPERATOR, Role.METRICS]
        refused = guarded.get(path, Role.TENANT_OPERATOR)
        assert refused.status == 403 and b"arena" not in refused.body
    # A wrong query of a stranger says nothing of the query.
    assert guarded.get("/api/v1/history?span=2h").status == 401
    certificates = guarded.get("/api/v1/now", Role.METRICS).json["certificates"]
    assert certificates.keys() == {"server"}


def test_no_secret_is_in_any_answer(pool_server: StartServer, tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, pool_server)
    salt = "a-salt-that-nobody-may-read"
    config = ClientConfig(guarded.server.endpoint, timeout_ms=10_000, tls=guarded.tls, token_file=guarded.token_file)
    with Client(config) as client:
        driver = Driver(client, "model/one", "acme", salt=salt)
        driver.turn()
    answers = [guarded.get(path, Role.METRICS).body.decode() for path in API]
    wait_for(lambda: guarded.get("/api/v1/now", Role.METRICS).json["counters"]["lookups"], "the lookup")
    shown = "".join(answers)
    for secret in (salt, str(tmp_path), "tls.key", *guarded.tokens.values()):
        assert secret not in shown


def test_a_tier_that_fails_is_a_fault_and_in_the_log(
    pool_server: StartServer, connect: Connect, tmp_path: Path
) -> None:
    directory = tmp_path / "kv"
    directory.mkdir()
    server = pool_server("--tier", f"file:{directory},size=64MiB")
    now = Answer(server.http_url, "/api/v1/now").json
    assert [tier["up"] for tier in now["tiers"]] == [True] and now["log"] == [] == _wrong(now)
    shutil.rmtree(directory)
    driver = Driver(connect(server), "model/one")

    def down() -> dict[str, Any] | None:
        driver.turn()
        now: dict[str, Any] = Answer(server.http_url, "/api/v1/now").json
        return None if now["tiers"][0]["up"] else now

    now = wait_for(down, "the tier to fail")
    (fault,) = (each["text"] for each in now["findings"] if each["level"] == "fault")
    assert fault.startswith("Tier file:") and "the tier failed, and the server does not call it for a while" in fault
    assert {"error"} <= {event["level"] for event in now["log"]}
    assert str(directory) not in "".join(event["text"] for event in now["log"])


def test_http_that_is_off_serves_no_page(pool_server: StartServer) -> None:
    assert pool_server("--http-listen", "").http_url == "off"
