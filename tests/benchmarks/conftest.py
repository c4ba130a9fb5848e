"""vLLM's configurations, for the tables that follow from them."""

from __future__ import annotations

import importlib.util

from tests.support.toy.fixtures import tiny_model, vllm_config

__all__ = ["tiny_model", "vllm_config"]

if importlib.util.find_spec("vllm") is None:
    collect_ignore = ["test_kv_bytes.py"]
