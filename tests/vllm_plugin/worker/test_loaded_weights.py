"""What the digest of the weights in memory cannot see it says, rather than that nothing has changed."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from vllm_plugin.worker import loaded_weights
from vllm_plugin.worker.loaded_weights import LoadedWeights


class Attention(torch.nn.Module):
    """A layer with a method of quantization for KV, as vLLM's attention has one, and no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = BaseKVCacheMethod.__new__(BaseKVCacheMethod)


class Model(torch.nn.Module):
    """Attention beside a layer whose weights are given as some kernel keeps them."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.attention, self.experts = Attention(), torch.nn.Module()
        self.experts.quant_method = object()
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                self.experts.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
            else:
                setattr(self.experts, name, value)


def digest(model: Model) -> bytes:
    context = {"attention": model.attention}
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    return LoadedWeights(config).digest()


def test_weights_in_parameters_are_named_by_every_byte() -> None:
    weight = torch.arange(1_000.0)
    before = digest(Model(w13_weight=weight))
    weight[-1] += 1
    assert b"" != before != digest(Model(w13_weight=weight)) != b""


@pytest.mark.parametrize("pending", [0, 30, 1 << 20])
def test_what_is_fetched_together_is_hashed_in_its_order(monkeypatch: pytest.MonkeyPatch, pending: int) -> None:
    monkeypatch.setattr(loaded_weights, "MAX_PENDING_BYTES", pending)
    parts = [(bytes([nth]) * (9 * nth), nth % 3 == 0, nth % 2 == 0) for nth in range(9)]
    ours, expected = loaded_weights._Digest(), hashlib.sha256()
    for data, is_tensor, by_checksum in parts:
        ours.add(torch.tensor(list(data), dtype=torch.uint8) if is_tensor else data, by_checksum=by_checksum)
        expected.update(xxhash.xxh3_64_digest(data) if by_checksum else data)
    assert ours.digest() == expected.digest()


def test_a_layer_around_another_has_the_weights_of_that_one() -> None:
    model = Model(weight=torch.ones(4))
    inner, model.experts = model.experts, torch.nn.Module()
    model.experts.base_layer, model.experts.quant_method = inner, inner.quant_method
    assert digest(model)


@pytest.mark.parametrize(
    "held",
    [
        {"weight": None, "bias": torch.ones(4)},
        {"w13_weight": object(), "w13_weight_scale": torch.ones(4)},
        {"w13_weight": (torch.ones(4), torch.ones(4))},
        {"weight_packed": torch.empty(0), "weight_scale": torch.ones(4)},
    ],
    ids=["nowhere", "an object of the kernel's", "a tuple", "packed away"],
)
def test_weights_that_a_kernel_keeps_elsewhere_have_no_name(held: dict[str, Any]) -> None:
    assert digest(Model(**held)) == b""
