"""The soak finds wrong bytes."""

import json
import tempfile
from pathlib import Path

import pytest

from benchmarks.cases import soak
from benchmarks.harness import measuring as harness


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
