"""A class that computes another function, registered for the architecture of the base: what a plugin of vLLM may do.

vLLM imports the module in its worker, as the home of `Extension`, before it makes the model. The class is registered
where the environment says so: two engines with this module differ in nothing else.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM

SCALE = 1.5
IS_REGISTERED = "OTHER_LLAMA"


class OtherLlama(LlamaForCausalLM):
    """Scales positions."""

    def forward(self, input_ids: Any, positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(input_ids, (positions * SCALE).long(), *args, **kwargs)


class Extension:
    """Does nothing itself."""


if IS_REGISTERED in os.environ:
    ModelRegistry.register_model("LlamaForCausalLM", OtherLlama)
