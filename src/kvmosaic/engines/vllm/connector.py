"""vLLM's facade: checks the role, delegates to one half, turns any fault into a miss.

Nothing is decided here. A fault in our code is logged once per place and counted, and the engine goes on as if
the cache had nothing; only at start may a refusal reach the user.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvmosaic.engines.vllm.options import parse_options
from kvmosaic.engines.vllm.plans import ConnectorMeta
from kvmosaic.engines.vllm.scheduler import SchedulerHalf
from kvmosaic.engines.vllm.start import start_scheduler
from kvmosaic.engines.vllm.worker import WorkerHalf

logger = logging.getLogger(__name__)
faults: Counter[str] = Counter()
"""Faults of our own code that were turned into misses, by method."""

Result = TypeVar("Result")


def harmless(default: Callable[..., Result]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Answer `default(self, *args)` when the method raises: the engine must never see our exception."""

    def wrap(method: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Result:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                faults[method.__name__] += 1
                if faults[method.__name__] == 1:
                    logger.exception("kvmosaic: %s failed; the engine goes on without it", method.__name__)
                return default(self, *args)

        return guarded

    return wrap


def nothing(*_: object) -> None:
    """The default of a method whose answer may be missing."""


def log_like_vllm() -> None:
    """vLLM sets up its own logger only; what kvmosaic has to say belongs into the same log."""
    ours, theirs = logging.getLogger("kvmosaic"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def not_kept(*_: object) -> tuple[bool, dict[str, Any] | None]:
    """The blocks of a finished request may be freed at once; nothing goes into its answer."""
    return False, None


class MosaicConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores and reloads the KV cache of any model through a kvmosaic server of this machine."""

    _worker: WorkerHalf
    _scheduler: SchedulerHalf

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_like_vllm()
        options = parse_options(self._kv_transfer_config.kv_connector_extra_config, os.environ)
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerHalf(options, vllm_config, kv_cache_config)
        else:
            # vLLM reads the policy after this. Its default would fail a user's request over a fault of the cache, and
            # a user's own choice of it cannot be told from the default: hence a key of ours.
            self._kv_transfer_config.kv_load_failure_policy = options.load_failure_policy
            self._scheduler = start_scheduler(options, vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a dropped store is only a later miss."""
        return False

    @harmless(nothing)
    def shutdown(self) -> None:
        (self._worker if self.role is KVConnectorRole.WORKER else self._scheduler).close()

    # Worker half. vLLM calls the layer hooks for attention layers only, so whole pages move in the step hooks.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """May raise a refusal: this is the start of the engine."""
        self._worker.register_kv_caches(kv_caches)

    @harmless(nothing)
    def unregister_kv_caches(self) -> None:
        self._worker.unregister_kv_caches()

    @harmless(nothing)
    def restore_kv_caches(self) -> None:
        self._worker.restore_kv_caches()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_load_kv(self._meta())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    @harmless(nothing)
    def wait_for_save(self) -> None:
        self._worker.wait_for_save(self._meta())

    @harmless(lambda *_: KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.get_transfer_results()

    @harmless(nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.build_connector_worker_meta()

    def _meta(self) -> ConnectorMeta:
        meta = self._get_connector_metadata()
        assert isinstance(meta, ConnectorMeta)
        return meta

    # Scheduler half

    @harmless(nothing)
    def on_new_request(self, request: Any) -> None:
        self._scheduler.add(request)

    @harmless(lambda *_: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        num_external = self._scheduler.match(request, num_computed_tokens)
        return num_external, num_external > 0

    @harmless(nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.admit(request, blocks.get_block_ids(), num_external_tokens)

    @harmless(lambda self, output: self._scheduler.abandon_step(output))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.plan_step(scheduler_output)

    @harmless(nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.take_reports(connector_output)

    @harmless(not_kept)
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finish(request.request_id)
        return not_kept()

    @harmless(lambda *_: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler.owes()

    @harmless(lambda *_: False)
    def reset_cache(self) -> bool:
        self._scheduler.clear()
        return True
