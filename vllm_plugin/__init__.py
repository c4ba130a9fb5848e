"""The vLLM plugin: `KVPoolConnector`, found by vLLM through its `vllm.general_plugins` entry point."""

NAME = "KVPoolConnector"


def register() -> None:
    """Makes the connector known to vLLM. Runs in every vLLM process, maybe more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "vllm_plugin.connector", NAME)
