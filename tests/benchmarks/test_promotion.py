"""The figures of benchmarks.cases.promotion: both ways of waiting find every block, and a client loads all bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import mooncake_tier, promotion
from benchmarks.harness.measuring import Estimate

MIB = mooncake_tier.MIB


def test_every_prompt_is_found_and_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (mooncake_tier, promotion):
        monkeypatch.setattr(module, "PROMPT_BYTES", 64 * MIB)
    monkeypatch.setattr(promotion, "STEPS_MS", (2,))
    monkeypatch.setattr(promotion, "TRANSPORTS", ("shm",))
    figures = {row.what: row.figure for row in promotion.measure(tmp_path, 1)}
    assert len(figures) == 6
    for figure in figures.values():
        assert isinstance(figure, Estimate) and figure.figure > 0
