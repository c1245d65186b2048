"""What the engine's scheduler may ask of the server. No verb raises, and none waits past the step's budget.

One schedule() of the engine waits at most `budget_s` (+ 5 ms) over all calls since begin_step(), and 10 ms after a
slow answer. After a passed deadline nothing is asked for a while; commits and releases still go out.
Called on the engine's scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmosaic.client.session import Attachment, SchedulerSession
from kvmosaic.core.types import BootId, ReservationId
from kvmosaic.protocol.messages import Chain, Hit, Miss, Reserved


class SchedulerClient:
    """See the module."""

    def __init__(self, session: SchedulerSession, budget_s: float = 0.05) -> None: ...

    @property
    def attachment(self) -> Attachment | None:
        """What this step's answers belong to: it changes only in begin_step(), except to None when it is lost.

        Plans carry its boot id and epoch. None: nothing is asked in this step.
        """
        raise NotImplementedError

    def begin_step(self) -> Attachment | None:
        """Call first in every schedule(): renews the budget and the attachment."""
        raise NotImplementedError

    def lookup(self, request: str, first_chunk: int, digest_bytes: int, digests: bytes) -> Hit | Miss | None:
        """Which boundary is served; a Hit leases it to the request in place of its earlier lease.

        None: not asked or not answered; the request then holds no lease. An answer belongs to `attachment`.
        """
        raise NotImplementedError

    def release(self, request: str) -> None:
        """End the request's lease. Without a lease, or with one of an earlier boot, it does nothing."""

    def reserve(self, chains: Sequence[Chain]) -> Reserved | None:
        """Room to write. None: not asked or not answered, nothing is reserved."""
        raise NotImplementedError

    def commit(self, boot_id: BootId, reservation: ReservationId, written: bytes) -> None:
        """End a reservation: objects with `written[i]` 1 become visible, the others are aborted.

        `boot_id` is that of the plan; reservations of an earlier boot are gone and only dropped here.
        """

    def clear(self, timeout_s: float = 1.0) -> bool:
        """Forget this engine's namespace; not part of the step's budget. False when the server did not confirm."""
        raise NotImplementedError
