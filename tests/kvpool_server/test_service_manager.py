from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvpool_server.process.service_manager import notify


@pytest.mark.parametrize("is_abstract", [False, True])
def test_the_manager_is_told(is_abstract: bool, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"kvpool-test-{os.getpid()}" if is_abstract else str(socket_dir / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if is_abstract else name)
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if is_abstract else name)
        notify("READY=1", "STATUS=serving")
        assert manager.recv(100) == b"READY=1\nSTATUS=serving"


def test_a_manager_that_is_gone_is_logged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/notify")
    notify("READY=1")
    assert "the service manager could not be told" in capsys.readouterr().out
