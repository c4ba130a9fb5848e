"""What engines have in common decides what they share: the weights wherever they lie, and all that changes KV.

Llama 4 scales queries by position where max_model_len is above 32,768, and nothing in its checkpoint says so.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.engine import Engine, EngineSpec, kvpool_transfer_config
from testbed.tiny_models import write
from tests.e2e.conftest import FLOAT32, PATIENT, assert_same, hit_tokens, prompt, running
from tests.support.processes import ServerProcess
from tests.support.real_engines import drain

pytestmark = pytest.mark.vllm

LENGTH = 400
SCALED_FROM = 64
"""Tokens after which the scale is not 1: of published checkpoints 8,192."""


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, shapes_dir: Path, e2e_server: ServerProcess
) -> Iterator[list[Engine]]:
    """Llama 4 for long prompts, for short ones, and for short ones from a copy under another name."""
    model = write("llama4", shapes_dir)
    copied = Path(shutil.copytree(model, tmp_path_factory.mktemp("copies") / "by-another-name"))
    overrides = {"max_position_embeddings": 65_536, "floor_scale": SCALED_FROM}
    transfer = kvpool_transfer_config(e2e_server.endpoint, salt="identity", **PATIENT)
    specs = [
        EngineSpec(place, transfer, {**FLOAT32, "hf_overrides": overrides, "max_model_len": length}, in_process=True)
        for place, length in ((model, 33_024), (model, 2_048), (copied, 2_048))
    ]
    with running(tmp_path_factory.mktemp("identity"), *specs) as started:
        yield started


def test_engines_share_where_they_would_compute_the_same_and_nowhere_else(engines: list[Engine]) -> None:
    long, short, copy = engines
    text = prompt(LENGTH, "identity")
    (scaled,) = long.generate([text])
    drain(long)
    (plain,) = short.generate([text])
    drain(short)
    assert plain.cached_tokens == 0, "it read KV that it would have computed otherwise"
    assert plain.logprobs != scaled.logprobs, "a mix-up would not show"
    (shared,) = copy.generate([text])
    assert shared.cached_tokens == hit_tokens(LENGTH), "equal weights under another name"
    assert_same([shared], [plain])
