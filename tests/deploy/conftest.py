"""What the tests of the dashboard need of vLLM: the configuration of a tiny model."""

from __future__ import annotations

import importlib.util

from tests.support.toy.fixtures import tiny_model, vllm_config

__all__ = ["tiny_model", "vllm_config"]

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_dashboard.py"]
