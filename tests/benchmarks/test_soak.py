"""The soak: some seconds of it, with everything it does in ten minutes."""

import json
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.cases import soak
from benchmarks.harness import measuring as harness
from testbed.ports import free_port


def test_nothing_breaks_in_some_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(soak, "CALAMITY_EVERY_S", (0.1, 0.5))
    soak.main(seconds=12, seed=1)
    rows = {row["what"]: row for row in json.loads((tmp_path / "soak.json").read_text())["rows"]}
    assert rows["operations"]["figure"] > 100 and rows["of them, hit"]["figure"] > 0.1
    assert sum(row["figure"] for what, row in rows.items() if what.startswith("calamities")) >= 2
    assert all(row["met"] for row in rows.values() if row["met"] is not None)


def test_wrong_bytes_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # What failed leaves its logs.
    content = soak.content
    stored = []

    def changing(prefix: int, depth: int) -> object:
        """After a while another block is expected than was stored."""
        stored.append(None)
        return content(prefix, depth + (len(stored) > 2_000))

    monkeypatch.setattr(soak, "content", changing)
    monkeypatch.setattr(soak.Calamities, "next", lambda self: None)
    with pytest.raises(SystemExit, match="something broke"):
        soak.main(seconds=6, seed=1)
    rows = {row["what"]: row for row in json.loads((tmp_path / "soak.json").read_text())["rows"]}
    assert rows["wrong blocks"]["figure"] > 0


def test_a_server_that_ends_by_itself_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(soak, "SERVERS", 1)
    monkeypatch.setattr(soak, "CALAMITY_EVERY_S", (0.1, 0.5))

    def end_and_kill(calamities: soak.Calamities) -> None:
        (server,) = calamities._world.servers
        assert server.process is not None
        server.process.kill()
        server.process.wait(30)
        calamities._kill()

    monkeypatch.setattr(soak.Calamities, "next", end_and_kill)
    with pytest.raises(AssertionError, match="ended by itself"):
        soak.main(seconds=3, seed=1)


def test_a_process_that_does_not_end_when_told_to_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(soak, "END_S", 0.3)
    deaf = "import signal, socket, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    deaf += "listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))\nwhile True: signal.pause()"
    port = free_port()
    process = soak.Process([sys.executable, "-c", deaf, str(port)], port, tmp_path / "log")
    process.start()
    process.wait_until_there()
    with pytest.raises(RuntimeError, match=r"did not end within"):
        process.end(signal.SIGTERM)
    assert process.process is not None and process.process.poll() == -signal.SIGKILL
