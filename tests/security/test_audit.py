"""The audit log: who was refused, who changed what; what others chose is escaped, and floods are bounded."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import (
    ConfigError,
    KVPoolError,
    OutOfSpaceError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from kvpool.protocol.types import Quota
from kvpool.security.principal import Principal, Role
from kvpool_server.access import audit
from kvpool_server.access.audit import MAX_QUEUED, READ, REFUSALS_A_SECOND, AuditLog
from kvpool_server.tiering.tiered_pool import TieredPool
from tests.support.audit_log import entries
from tests.support.certificates import DAY, forge
from tests.support.in_process_server import InProcessServer
from tests.support.processes import ServerProcess, wait_for
from tests.support.secured_server import SecuredServer
from tests.support.values import namespace_spec, payload, run_of


def test_refusals_and_changes_are_logged(pool_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    secured, log = SecuredServer(tmp_path, pool_server), tmp_path / "audit.json"
    nobody = forge(secured.authority.directory, tmp_path / "forged", [], starts_in=-DAY, ends_in=DAY)
    model = "a\nmodel \x1b[31m{}"
    with secured.client(Role.ENGINE_WRITE) as client:
        namespace = client.open_namespace(namespace_spec(tenant="acme", model=model))
        client.open_namespace(namespace.spec)
        client.put_blocks(namespace, run_of("block"), [payload("block", 256)])
        with pytest.raises(PermissionDeniedError):
            client.admin.clear()
    with Client(secured.config(tls=nobody)) as client, pytest.raises(UnauthenticatedError):
        client.admin.ping()
    with secured.client(Role.OPERATOR) as client:
        client.admin.set_quotas([Quota("tenant:acme", 1 << 30)])
        client.admin.clear()
    wait_for(lambda: len(entries(log)) == 7, "seven lines")
    read, _, opened, denied, unknown, quotas, cleared = entries(log)
    assert (read["caller"], read["call"], read["outcome"], read["what"]) == (None, READ, "OK", "certificates")
    who = "spiffe://kvpool.local/kvpool/acme/engine-write"
    assert (opened["caller"], opened["call"], opened["outcome"], opened["model"]) == (who, "OpenNamespace", "OK", model)
    assert opened["namespace"] == namespace.fingerprint.hex()
    assert (denied["caller"], denied["call"], denied["outcome"]) == (who, "Clear", "PERMISSION_DENIED")
    assert (unknown["caller"], unknown["call"], unknown["outcome"]) == (None, "Ping", "UNAUTHENTICATED")
    assert quotas["quotas"] == f"tenant:acme={1 << 30}"
    assert (cleared["namespace"], cleared["count"]) == ("all", 1)
    assert all(str(each["peer"]).startswith("ipv4:127.0.0.1:") for each in entries(log)[2:])
    assert "\x1b" not in log.read_text()


def test_a_flood_of_refusals_is_counted_and_leaves_lines_to_other_callers_and_to_all_changes(tmp_path: Path) -> None:
    now = [0.0]
    log = AuditLog(str(tmp_path / "audit.json"), lambda: now[0])
    for _ in range(10 * MAX_QUEUED):
        log.write("Ping", "UNAUTHENTICATED", caller=None, peer="ipv4:127.0.0.1:1")
    dropped = log.num_dropped
    assert dropped == 10 * MAX_QUEUED - 38, "three eighths of the lines of a second, as Shares gives"
    log.write("Clear", "PERMISSION_DENIED", caller=Principal("acme", Role.ENGINE_READ), peer="ipv4:127.0.0.1:2")
    for _ in range(2 * REFUSALS_A_SECOND):
        log.write("Clear", "OK", caller=None, peer="ipv4:127.0.0.1:2", is_change=True)
    log.read("tokens", ["/etc/tokens"], ConfigError("no tokens"))
    assert log.num_dropped == dropped
    now[0] = 1.0
    log.write("Ping", "UNAUTHENTICATED", caller=None, peer="ipv4:127.0.0.1:1")
    log.close()
    lines = entries(tmp_path / "audit.json")
    assert [line["call"] for line in lines].count("Clear") == 1 + 2 * REFUSALS_A_SECOND
    assert lines[-2]["outcome"] == "REFUSED", "the line about credentials"
    assert lines[-1]["dropped_before"] == dropped


def test_no_change_is_made_that_the_log_would_lack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its disk takes nothing: the log is a pipe that nobody reads."""
    monkeypatch.setattr(audit, "MAX_QUEUED", 10)
    path = tmp_path / "audit.json"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = AuditLog(str(path))
    server = InProcessServer(1 << 20, 1 << 16, audit=log)
    with contextlib.closing(server), Client(ClientConfig(f"127.0.0.1:{server.port}", timeout_ms=2_000)) as client:
        clears = iter(range(10_000))
        with pytest.raises(OutOfSpaceError, match="audit log"):
            all(client.admin.clear() == 0 for _ in clears)
        client.admin.ping()
        made, text = next(clears) - 1, b""
        while text.count(b"Clear") < made:
            text += os.read(reader, 1 << 16) if select.select([reader], [], [], 10)[0] else pytest.fail("lines lack")
        wait_for(lambda: not log.is_behind(""), "the queue to be written")
        client.admin.clear()
    log.close()
    os.close(reader)


def test_nothing_is_changed_while_the_disk_is_full(tmp_path: Path) -> None:
    log = AuditLog("/dev/full")
    server = InProcessServer(1 << 20, 1 << 16, audit=log)
    with contextlib.closing(server), Client(ClientConfig(f"127.0.0.1:{server.port}", timeout_ms=10_000)) as client:
        client.admin.clear()  # Nobody knows yet.
        wait_for(lambda: log.is_behind(""), "the failure")
        with pytest.raises(OutOfSpaceError, match="audit log"):
            client.admin.clear()
        client.admin.ping()
    log.close()


def test_a_log_that_is_moved_or_whose_directory_is_away_goes_on(tmp_path: Path) -> None:
    """As where logrotate has moved the file, and the server may not make another. A file that exists keeps its mode."""
    directory = tmp_path / "logs"
    directory.mkdir()
    (directory / "audit.json").touch(0o640)
    log = AuditLog(str(directory / "audit.json"))
    log.write("Clear", "OK", caller=None, peer="-", is_change=True)
    directory.rename(tmp_path / "moved")
    log.write("Drain", "OK", caller=None, peer="-", is_change=True)
    moved = tmp_path / "moved" / "audit.json"
    wait_for(lambda: len(entries(moved)) == 2, "the line in the file that was moved")
    directory.mkdir()
    log.write("Remove", "OK", caller=None, peer="-", is_change=True)
    log.close()
    assert [line["call"] for line in entries(directory / "audit.json")] == ["Remove"]
    modes = [oct(path.stat().st_mode & 0o777) for path in (moved, directory / "audit.json")]
    assert modes == ["0o640", "0o600"]


def test_a_change_that_fails_has_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may have changed something before."""

    async def fail(_: TieredPool, fingerprint: bytes = b"") -> int:
        raise ZeroDivisionError if fingerprint else UnavailableError("the tier does not answer")

    monkeypatch.setattr(TieredPool, "clear", fail)
    log = AuditLog(str(tmp_path / "audit.json"))
    server = InProcessServer(1 << 20, 1 << 16, audit=log)
    with contextlib.closing(server), Client(ClientConfig(f"127.0.0.1:{server.port}", timeout_ms=10_000)) as client:
        for fingerprint in (b"", bytes(32)):
            with pytest.raises(KVPoolError):
                client.admin.clear(fingerprint)
    log.close()
    assert [(line["call"], line["outcome"]) for line in entries(tmp_path / "audit.json")] == [
        ("Clear", "UNAVAILABLE"), ("Clear", "UNKNOWN"),
    ]  # fmt: skip


def test_a_log_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="see --audit-log"):
        AuditLog(str(tmp_path / "nowhere" / "audit.json"))
