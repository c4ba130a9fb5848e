"""A simulated routing of vLLM that its CPU kernels can read: they want 32-bit indices, and its own strategies give 64.

vLLM imports the module in its worker, as the home of `Extension`, before it makes the model.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (
    DistributionBasedRouting,
    RoutingSimulator,
)

STRATEGY = "uniform_int32"


class Int32Routing(DistributionBasedRouting):
    """Random experts."""

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


RoutingSimulator.register_strategy(STRATEGY, Int32Routing("uniform"))
