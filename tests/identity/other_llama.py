"""A class that computes another function, registered for the architecture of the base: what a plugin of vLLM may do.

vLLM imports the module in its worker, as the home of `Extension`, before it makes the model.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM

SCALE = 1.5


class OtherLlama(LlamaForCausalLM):
    """Scales positions."""

    def forward(self, input_ids: Any, positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(input_ids, (positions * SCALE).long(), *args, **kwargs)


class Extension:
    """Does nothing itself."""


ModelRegistry.register_model("LlamaForCausalLM", OtherLlama)
