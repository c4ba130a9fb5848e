"""The page over HTTP, without a browser: its files, its JSON, and for whom they are; and what the files contain."""

from __future__ import annotations

import hashlib
import importlib.resources
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from kvpool.protocol.messages import fields_of
from kvpool.protocol.reports import Cause
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tokens import create_token
from kvpool_server.observability.site import INTERVAL_S, NAMES, read_static_files
from tests.conftest import Connect, StartServer
from tests.support.certificates import DAY
from tests.support.driven_pool import SAVED_S, Driver
from tests.support.page_client import Answer, Guarded
from tests.support.processes import ServerProcess, wait_for

API = ("/api/v1/now", "/api/v1/history", "/api/v1/value")


def test_the_page_and_its_files_are_served_with_a_strict_policy(shared_server: ServerProcess) -> None:
    page = Answer(shared_server.http_url, "/")
    assert page.status == 200 and page.body.startswith(b"<!doctype html>")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in page.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["img-src"] == "'self' data:"
    assert "unsafe" not in page.headers["Content-Security-Policy"]
    now = Answer(shared_server.http_url, "/api/v1/now")
    for answer in (page, Answer(shared_server.http_url, "/page/page.js"), now):
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert "Content-Security-Policy" in answer.headers
    assert now.headers["Cache-Control"] == "no-store"
    assert Answer(shared_server.http_url, "/page/page.css").headers["Content-Type"] == "text/css; charset=utf-8"


def test_no_path_leads_out_of_the_table(shared_server: ServerProcess) -> None:
    for path in (
        "/page", "/page/", "/page/../http.py", "/page/%2e%2e/%2e%2e/etc/passwd", "/page//etc/passwd", "//etc/passwd",
        "/page/uPlot/../page.js", "/page/index.html", "/page/uPlot/README.md", "/../../etc/passwd", "/page/page.js/",
        "/page/page.js%00", "/api/v1", "/api/v1/now/", "/index.html",
    ):  # fmt: skip
        answer = Answer(shared_server.http_url, path)
        assert (answer.status, answer.body) == (404, b"try /, /metrics or /healthz\n"), path


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
    drivers[0].report("gpu-1:1")
    now, stats = Answer(server.http_url, "/api/v1/now").json, client.admin.stats()
    shown, sample = now["stats"], now["sample"]
    assert shown["counters"] == stats.counters and sample["boot"] == f"{stats.boot_token:016x}"
    assert shown["num_entries"] == stats.num_entries == sum(driver.served.stored_blocks for driver in drivers)
    assert (shown["arena_bytes"], shown["free_bytes"]) == (stats.arena_bytes, stats.free_bytes)
    assert now["causes"] == {cause.label: cause.gloss for cause in Cause}
    assert shown["quotas"] == [fields_of(quota) for quota in client.admin.quotas()]
    assert stats.server is not None
    assert shown["server"]["usage"] == [fields_of(used) for used in stats.server.usage]
    assert shown["server"]["http_port"] == stats.server.http_port
    used = {(each["model"], each["tenant"]): each for each in shown["server"]["usage"]}
    for driver, who in zip(drivers, (("model/one", "acme"), ("model/two", "")), strict=True):
        assert used[who]["lookup_tokens"] == driver.served.looked_up_tokens
        assert used[who]["hit_tokens"] == driver.served.hit_tokens
        assert used[who]["held_blocks"] == driver.served.stored_blocks
    acme = used["model/one", "acme"]
    assert acme["saved_seconds"] == pytest.approx(drivers[0].served.hit_tokens * SAVED_S)
    assert acme["computed_tokens"].keys() == {"never_stored"} and used["model/two", ""]["saved_seconds"] == 0
    assert sample["hit_tokens"] == sum(driver.served.hit_tokens for driver in drivers) > 0
    assert sample["saved_seconds"] == acme["saved_seconds"] and abs(sample["time"] - time.time()) < 60
    assert _wrong(now) == [] and now["state"] == "ok" and shown["server"]["uptime_seconds"] > 0
    first, *_ = samples = Answer(server.http_url, "/api/v1/history").json["samples"]
    assert all(each.keys() == sample.keys() and each["boot"] == sample["boot"] for each in samples)
    assert abs(first["time"] - (sample["time"] - shown["server"]["uptime_seconds"])) < INTERVAL_S + 5


def test_numbers_are_for_those_who_may_read_metrics_and_have_no_secret(
    pool_server: StartServer, tmp_path: Path
) -> None:
    guarded = Guarded(tmp_path, pool_server)
    salt = "a-salt-that-nobody-may-read"
    with guarded.client(Role.OPERATOR) as client:
        Driver(client, "model/one", "acme", salt=salt).turn()
    wait_for(lambda: guarded.get("/api/v1/now", Role.METRICS).json["stats"]["counters"]["lookups"], "the lookup")
    for path in ("/", "/page/page.js", "/healthz"):
        assert guarded.get(path).status == 200
    for path in API:
        stranger = guarded.get(path)
        assert (stranger.status, stranger.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert guarded.get(path, token=create_token(Principal(ALL_TENANTS, Role.METRICS), DAY)[0]).status == 401
        assert [role for role in Role if guarded.get(path, role).status == 200] == [Role.OPERATOR, Role.METRICS]
        refused = guarded.get(path, Role.TENANT_OPERATOR)
        assert refused.status == 403 and b"arena" not in refused.body
        body = guarded.get(path, Role.METRICS).body.decode()
        for secret in (salt, str(tmp_path), "tls.key", *guarded.tokens.values()):
            assert secret not in body
    certificates = guarded.get("/api/v1/now", Role.METRICS).json["stats"]["server"]["certificate_ends"]
    assert certificates.keys() == {"server"}


def test_a_tier_that_fails_is_a_fault_and_in_the_log(
    pool_server: StartServer, connect: Connect, tmp_path: Path
) -> None:
    directory = tmp_path / "kv"
    directory.mkdir()
    server = pool_server("--tier", f"file:{directory},size=64MiB")
    now = Answer(server.http_url, "/api/v1/now").json
    assert [tier["up"] for tier in now["stats"]["tiers"]] == [True] and now["log"] == [] == _wrong(now)
    shutil.rmtree(directory)
    driver = Driver(connect(server), "model/one")

    def down() -> dict[str, Any] | None:
        driver.turn()
        now: dict[str, Any] = Answer(server.http_url, "/api/v1/now").json
        return None if now["stats"]["tiers"][0]["up"] else now

    now = wait_for(down, "the tier to fail")
    (fault,) = (each["text"] for each in now["findings"] if each["level"] == "fault")
    assert fault.startswith("Tier file:") and "the tier failed, and the server does not call it for a while" in fault
    assert {"error"} <= {event["level"] for event in now["log"]}
    assert str(directory) not in "".join(event["text"] for event in now["log"])


ROOT = Path(__file__).parents[3]
STATIC = importlib.resources.files("kvpool_server.observability") / "static"
MAX_BYTES = 300 << 10


def _text(name: str) -> str:
    return STATIC.joinpath(*name.split("/")).read_text()


def test_the_table_has_each_file() -> None:
    files = read_static_files()
    assert set(files) == {"/", *(f"/page/{name}" for name in NAMES if name != "index.html")}
    for name in NAMES:
        file = files["/" if name == "index.html" else f"/page/{name}"]
        assert file.body == _text(name).encode()
    assert sum(len(file.body) for file in files.values()) < MAX_BYTES
    on_disk = {str(path.relative_to(str(STATIC))) for path in Path(str(STATIC)).rglob("*") if path.is_file()}
    assert on_disk - set(NAMES) == {"uPlot/README.md", "uPlot/LICENSE"}


def test_the_charting_library_is_the_one_that_its_readme_names() -> None:
    readme = _text("uPlot/README.md")
    sums = dict(re.findall(r"^\| `(\S+)` \| `([0-9a-f]{64})` \|$", readme, re.MULTILINE))
    assert sums.keys() == {"uPlot.iife.min.js", "uPlot.min.css", "LICENSE"}
    for name, digest in sums.items():
        assert hashlib.sha256((STATIC / "uPlot" / name).read_bytes()).hexdigest() == digest, name
    (version,) = re.findall(r"^# uPlot (\S+)$", readme, re.MULTILINE)
    assert f"(v{version})" in _text("uPlot/uPlot.iife.min.js")[:100]


def test_no_file_writes_markup_or_asks_other_hosts() -> None:
    for name in NAMES:
        if name.startswith("uPlot/"):
            continue
        text = _text(name)
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
            assert forbidden not in text, (name, forbidden)
        found = set(re.findall(r"(?:https?:)?//[a-z][\w.-]+", text))
        # The name of SVG's markup, which is no address, and a link to the documents.
        assert found <= {"http://www.w3.org", "https://github.com"}, name
    assert re.findall(r"<[^>]*https://github.com", _text("index.html")) == ['<a href="https://github.com']
    assert not re.search(r"<script(?![^>]* src=)|\son\w+=|\sstyle=|<style", _text("index.html"))
    colours = re.findall(r"^\s*(--[\w-]+):", _text("page.css"), re.MULTILINE)
    assert colours and len(colours) == len(set(colours))
    assert len(re.findall(r"light-dark\(#\w+, #\w+\)", _text("page.css"))) == len(colours)
