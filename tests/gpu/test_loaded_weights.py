"""The digest of weights on a GPU depends on every byte, those of chunks and those beside them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_plugin.worker import loaded_weights

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("at", [0, (1 << 19) - 1, 1 << 19, -1])
def test_every_byte_on_the_device_counts(monkeypatch: pytest.MonkeyPatch, at: int):
    layer = torch.nn.Module()
    layer.attention = torch.nn.Module()
    weight = torch.zeros((1 << 19) + 40, dtype=torch.uint8, device="cuda")
    layer.register_buffer("one", weight)
    layer.register_buffer("other", torch.ones(7, dtype=torch.uint8, device="cuda"))
    context = SimpleNamespace(static_forward_context={"attention": layer.attention})
    config: Any = SimpleNamespace(compilation_config=context)
    weights = loaded_weights.LoadedWeights(config)
    before = weights.digest()
    with monkeypatch.context() as patch:
        patch.setattr(loaded_weights, "MAX_PENDING_BYTES", 0)
        assert weights.digest() == before != b""
    weight[at] = 1
    assert before != weights.digest() != b""
