"""Entry point of vLLM's plugin loader: makes the bare name `MosaicConnector` known. Imports nothing heavy."""

from __future__ import annotations

NAME = "MosaicConnector"
MODULE = "kvmosaic.engines.vllm.connector"


def register() -> None:
    """Register the connector; vLLM calls this once or more in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
