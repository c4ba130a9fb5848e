"""An indexer that does not start leaves no process behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import dynamo
from tests.support.dynamo import DynamoIndexer


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "], ids=["ends", "does not even end"])
def test_an_indexer_that_never_answers_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str) -> None:
    silent, pid = tmp_path / "python", tmp_path / "pid"
    silent.write_text(f"#!/bin/sh\n{trap}echo $$ > {pid}.new; mv {pid}.new {pid}\nwhile :; do sleep 0.05; done\n")
    silent.chmod(0o755)
    monkeypatch.setattr(dynamo, "dynamo_python", lambda: silent)
    monkeypatch.setattr(dynamo, "START_DEADLINE_S", 3.0)
    monkeypatch.setattr(dynamo, "STOP_DEADLINE_S", 1.0)
    with pytest.raises(AssertionError, match="an answer of Dynamo's indexer: not within"):
        DynamoIndexer(tmp_path / "log", block_tokens=4)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
