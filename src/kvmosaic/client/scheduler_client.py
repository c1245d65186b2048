"""What the engine's scheduler may ask of the server. No verb raises, and none waits past the step's budget.

One schedule() of the engine waits at most `budget_s` (+ 5 ms) over all calls since begin_step(), and a fifth of it
after a slow answer. After a passed deadline nothing is asked for a while; commits and releases still go out.
Called on the engine's scheduler thread only.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmosaic.client.connection import LateReply
from kvmosaic.client.halves import SchedulerSession
from kvmosaic.client.patience import Patience
from kvmosaic.client.session import Attachment
from kvmosaic.core.types import BootId, Outcome, ReservationId
from kvmosaic.errors import DeadlinePassed, MosaicError
from kvmosaic.protocol.messages import (
    Chain,
    Clear,
    Cleared,
    Commit,
    Failed,
    Hit,
    Lookup,
    Miss,
    NotReady,
    Release,
    Reply,
    Request,
    Reserve,
    Reserved,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What the verbs came to since the start. `skipped`: not asked, for want of a server, budget or patience."""

    lookups: int = 0
    hits: int = 0
    reserves: int = 0
    skipped: int = 0
    deadlines: int = 0
    failures: int = 0
    outdated: int = 0
    waited_s: float = 0.0


class SchedulerClient:
    """Works on one attachment per step, so that all plans of a step agree."""

    def __init__(
        self,
        session: SchedulerSession,
        budget_s: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counters()
        self._session = session
        self._patience = Patience(budget_s)
        self._clock = clock
        self._attachment: Attachment | None = None
        self._leases: dict[str, BootId] = {}
        self._last_failure = ""

    @property
    def attachment(self) -> Attachment | None:
        """What this step's answers belong to: changed by begin_step() only, except to None when it is lost.

        Plans carry its boot id and epoch. None: nothing is asked in this step.
        """
        return self._attachment

    def begin_step(self) -> Attachment | None:
        """Call first in every schedule(): renews the budget and the attachment."""
        self._patience.begin_step()
        self._attachment = self._session.attachment
        return self._attachment

    def lookup(self, request: str, first_chunk: int, digest_bytes: int, digests: bytes) -> Hit | Miss | None:
        """Which boundary is served; a Hit leases it to the request in place of its earlier lease.

        None: not asked or not answered; the request then holds no lease. An answer belongs to `attachment`.
        """
        attachment = self._may_ask()
        if attachment is None:
            self.release(request)
            return None
        self.counters.lookups += 1
        match self._ask(attachment, Lookup(0, attachment.epoch, request, first_chunk, digest_bytes, digests)):
            case Hit() as hit:
                self.counters.hits += 1
                self._leases[request] = attachment.boot_id
                return hit
            case Miss() as miss:
                self._leases.pop(request, None)
                return miss
            case _:
                # A late Hit would leave a lease, and a request that was not served leaves the earlier one.
                self._leases.pop(request, None)
                self._session.post(Release(0, request), attachment.boot_id)
                return None

    def release(self, request: str) -> None:
        """End the request's lease. Without a lease, or with one of an earlier boot, it does nothing."""
        boot_id = self._leases.pop(request, None)
        if boot_id is not None:
            self._session.post(Release(0, request), boot_id)

    def reserve(self, chains: Sequence[Chain]) -> Reserved | None:
        """Room to write. None: not asked or not answered, nothing is reserved."""
        attachment = self._may_ask()
        if attachment is None:
            return None
        self.counters.reserves += 1

        def abort(reply: Reply) -> None:
            if isinstance(reply, Reserved) and reply.reservation:
                num_objects = reply.outcomes.count(Outcome.GRANTED)
                self._session.post(Commit(0, reply.reservation, bytes(num_objects)), attachment.boot_id)

        reply = self._ask(attachment, Reserve(0, attachment.epoch, tuple(chains)), abort)
        return reply if isinstance(reply, Reserved) else None

    def commit(self, boot_id: BootId, reservation: ReservationId, written: bytes) -> None:
        """End a reservation: objects with `written[i]` 1 become visible, the others are aborted.

        `boot_id` is that of the plan; reservations of an earlier boot are gone and only dropped here.
        """
        self._session.post(Commit(0, reservation, written), boot_id)

    def clear(self, timeout_s: float = 1.0) -> None:
        """Share nothing from now on with what was stored before; not part of the step's budget.

        When the server does not confirm it in time, nothing is asked before it has attached the engine anew.
        """
        self._session.weights = secrets.token_hex(8)
        attachment = self._session.attachment
        if attachment is None:
            return
        try:
            reply = attachment.connection.request(Clear(0, weights=self._session.weights), timeout_s)
        except MosaicError as error:
            logger.warning("the server has not confirmed the clear: %s; it is asked again", error)
            reply = None
        if not isinstance(reply, Cleared):
            self._attachment = None
            self._session.outdate(attachment)

    def check(self) -> None:
        """The step's attachment is one of this session's life; budgets hold."""
        self._patience.check()
        self._session.check()

    def _may_ask(self) -> Attachment | None:
        if self._attachment is None or self._patience.allowance_s(self._clock()) <= 0:
            self.counters.skipped += 1
            return None
        return self._attachment

    def _ask(self, attachment: Attachment, message: Request, on_late: LateReply | None = None) -> Reply | None:
        """None: no answer."""
        began = self._clock()
        try:
            reply = attachment.connection.request(message, self._patience.allowance_s(began), on_late)
        except DeadlinePassed:
            now = self._clock()
            self._patience.gave_up(now - began, now)
            self.counters.deadlines += 1
            if self.counters.deadlines == 1:
                logger.warning("the server was too slow for a step's patience; this is said once and counted")
            self.counters.waited_s += now - began
            return None
        except MosaicError as error:
            self._fail(message, str(error))
            self._attachment = None
            return None
        waited_s = self._clock() - began
        self._patience.answered(waited_s)
        self.counters.waited_s += waited_s
        if isinstance(reply, NotReady):
            self.counters.outdated += 1
            self._session.outdate(attachment)
            self._attachment = None
        elif isinstance(reply, Failed):
            self._fail(message, reply.reason)
        return reply

    def _fail(self, message: Request, reason: str) -> None:
        self.counters.failures += 1
        # A fault that meets every request must not fill the engine's log.
        if reason != self._last_failure:
            self._last_failure = reason
            logger.warning("%s failed: %s", type(message).__name__, reason)
