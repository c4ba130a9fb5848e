"""The vLLM plugin: `KVPoolConnector`, found by vLLM through its `vllm.general_plugins` entry point."""

import os
import time

NAME = "KVPoolConnector"
BEGAN_AT = "_KVPOOL_ENGINE_BEGAN_AT"
"""The environment variable with the time (ns since 1970) before which no process of the engine had read a file.

The underscore sets it apart from settings: a kvpool-server that a process of the engine starts refuses unknown ones.
"""


def register() -> None:
    """Makes the connector known to vLLM. Runs in every vLLM process, maybe more than once."""
    os.environ.setdefault(BEGAN_AT, str(time.time_ns()))  # For the engine's other processes, too.
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "vllm_plugin.connector", NAME)
