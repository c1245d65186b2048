"""The worker half: declares this rank's pages, carries out the plans of each step, reports what came of them.

Decides nothing and asks the server nothing: plans come from the scheduler half, the arena from the session. Called by
the connector on the engine's thread, once per step:

    start_load_kv -> wait_for_save -> get_transfer_results -> build_connector_worker_meta

or with wait_for_save last (speculative decoding); what was not ready for a report is reported by the next step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvmosaic.client import Attachment, WorkerSession
from kvmosaic.engines.transfers import Statistics, Transfers
from kvmosaic.engines.vllm.options import Options
from kvmosaic.engines.vllm.plans import ConnectorMeta, WorkerReport
from kvmosaic.engines.vllm.translate import register


class WorkerHalf:
    """See the module. Before register_kv_caches() every plan fails."""

    def __init__(self, options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._options = options
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._session: WorkerSession | None = None
        self._transfers = Transfers(rank=0, pages=(), attached=self._attachment)

    @property
    def statistics(self) -> Statistics:
        return self._transfers.statistics

    @property
    def loads_in_progress(self) -> int:
        return self._transfers.loads_in_progress

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Start to attach. Raises Refused when this engine is not served."""
        self.close()
        registration = register(self._options, self._vllm_config, self._kv_cache_config, kv_caches)
        self._transfers = Transfers(registration.declaration.rank, registration.pages, self._attachment)
        self._session = WorkerSession(
            self._options.socket, registration.engine, registration.declaration, self._transfers.end_copies
        )
        self._session.start()

    def start_load_kv(self, meta: ConnectorMeta) -> None:
        """Start the step's loads; while the engine computes nothing, carry them out at once."""
        for plan in meta.loads:
            self._transfers.load(plan, inline=not meta.busy)

    def wait_for_save(self, meta: ConnectorMeta) -> None:
        """Carry out the step's stores: afterwards the engine may reuse their blocks."""
        self._transfers.store(meta.stores)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Loads that have ended since the last step, each exactly once, failed ones in both sets."""
        ended, failed = self._transfers.take_loads()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """This rank's reports of stores since the last step."""
        stored = self._transfers.take_stored()
        return WorkerReport(stored) if stored else None

    def unregister_kv_caches(self) -> None:
        """vLLM 0.33, before sleep: the pages are about to go away. Idempotent."""
        self._transfers.suspend()

    def restore_kv_caches(self) -> None:
        """vLLM 0.33, after wake-up: the pages are back where they were. Idempotent."""
        self._transfers.resume()

    def close(self) -> None:
        """End copies, then the session. Idempotent."""
        self._transfers.close()
        if self._session is not None:
            self._session.close()
            self._session = None

    def check(self) -> None:
        self._transfers.check()

    def _attachment(self) -> Attachment | None:
        session = self._session
        return None if session is None else session.attachment
