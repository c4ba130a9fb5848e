"""What a plugin may add to vLLM: a class that computes another function, and a way to route tokens to experts.

vLLM imports the module in its worker, as the home of `Extension`, before it makes the model. Two engines with this
module differ in nothing but what their environments choose.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (
    DistributionBasedRouting,
    RoutingSimulator,
)
from vllm.model_executor.models.llama import LlamaForCausalLM

SCALE = 1.5


class OtherLlama(LlamaForCausalLM):
    """Scales positions."""

    def forward(self, input_ids: Any, positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(input_ids, (positions * SCALE).long(), *args, **kwargs)


class Int32Routing(DistributionBasedRouting):
    """Random experts, for vLLM's CPU kernels: they want 32-bit indices, and vLLM's own strategies give 64."""

    def route_tokens(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().route_tokens(hidden_states, router_logits, top_k, torch.int32)


class Extension:
    """Does nothing itself."""


RoutingSimulator.register_strategy("uniform_int32", Int32Routing("uniform"))
if "OTHER_LLAMA" in os.environ:
    ModelRegistry.register_model("LlamaForCausalLM", OtherLlama)
