"""What travels through vLLM between the halves of the connector: plans to the workers, reports back."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvmosaic.core.types import ReservationId
from kvmosaic.engines.plans import LoadPlan, StorePlan


@dataclass
class ConnectorMeta(KVConnectorMetadata):
    """One step's plans. `busy` says that the engine computes tokens in this step, so loads must not block it."""

    stores: tuple[StorePlan, ...] = ()
    loads: tuple[LoadPlan, ...] = ()
    busy: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Per reservation: how many ranks have reported, and one byte per object, 1 when all of those wrote it."""

    stored: dict[ReservationId, tuple[int, bytes]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Merge the reports of two sets of ranks."""
        assert isinstance(other, WorkerReport)
        merged = dict(self.stored)
        for reservation, report in other.stored.items():
            merged[reservation] = join_reports(merged.get(reservation), report)
        return WorkerReport(merged)


def join_reports(first: tuple[int, bytes] | None, second: tuple[int, bytes]) -> tuple[int, bytes]:
    """Add up ranks; an object is written only when every rank wrote it."""
    if first is None:
        return second
    written = bytes(a & b for a, b in zip(first[1], second[1], strict=True))
    return first[0] + second[0], written
