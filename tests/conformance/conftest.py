"""Real vLLM configurations, and servers for connectors that want one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.support.processes import ServerProcess
from tests.support.toy.fixtures import loud, one_thread, tiny_model, vllm_config

__all__ = ["loud", "one_thread", "tiny_model", "vllm_config"]

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="package")
def conformance_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the suite's own: it is stopped for a while, and its memory is spoilt."""
    server = ServerProcess(tmp_path_factory.mktemp("conformance"), "--memory", "64MiB", "--grace-ms", "100")
    yield server
    server.stop()
