"""What the digest of the weights in memory cannot see it says, rather than that nothing has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

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
