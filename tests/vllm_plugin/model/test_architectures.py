"""Each architecture that vLLM knows is compared with what kvpool cuts, or named as one that is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import vllm
from vllm.model_executor.models.registry import ModelRegistry

from tests.support.architectures import PAGE, rows_of_page

MORE = pytest.mark.more
SAMPLE = ("LlamaForCausalLM", "MiMoV2FlashForCausalLM", "MiniCPM3ForCausalLM", "DeepseekV32ForCausalLM")

pytestmark = pytest.mark.skipif(
    not vllm.__version__.startswith("0.32."), reason="the page has the architectures of vLLM 0.32"
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("names", [pytest.param(SAMPLE, id="some"), pytest.param((), id="all", marks=MORE)])
def test_layers_keep_what_the_page_says(names: tuple[str, ...]) -> None:
    """Ranks load their own heads at each tensor-parallel size, and nothing else has become of an architecture."""
    command = [sys.executable, "-m", "tests.support.architectures", *names]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [row[0] for row in rows] == list(names or sorted(ModelRegistry.get_supported_archs())), done.stderr[-2000:]
    told = rows_of_page()
    # Why a model is not built depends on what else is installed.
    assert [_outcome(row) for row in rows] == [_outcome(told[row[0]]) for row in rows]


def test_the_page_names_each_architecture() -> None:
    assert sorted(rows_of_page()) == sorted(ModelRegistry.get_supported_archs()), f"write {PAGE.name} again"


def test_no_architecture_of_the_page_disagrees() -> None:
    assert not [name for name, row in rows_of_page().items() if "DISAGREES" in row[3]]


def _outcome(row: list[str]) -> list[str]:
    return [*row[:3], row[3].split(":")[0].split(" (")[0]]
