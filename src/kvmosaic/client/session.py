"""One process half's session with the server: it attaches, and attaches again, for ever.

One daemon thread per session connects, attaches, watches the connection and cleans up, so that no other thread
ever waits for a server to appear. Others read `attachment` and post one-way messages, from any thread.
A life follows the table in `lifecycle`. `_changed` is a leaf lock.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvmosaic.client.connection import Connection
from kvmosaic.client.lifecycle import NEXT, Event, State
from kvmosaic.client.mail import Mail
from kvmosaic.core.types import BootId, EngineKey
from kvmosaic.errors import DeadlinePassed, MosaicError, Refused, RemoteProtocolError, ServerLost
from kvmosaic.layout.groups import Geometry
from kvmosaic.memory import arena
from kvmosaic.protocol.messages import (
    Attach,
    Attached,
    Attaching,
    Failed,
    Refusal,
    Reply,
    Request,
    Role,
)

logger = logging.getLogger(__name__)

_REPLY_TIMEOUT_S = 1.0
_SEARCH_EVERY_S = 0.1
_ATTACH_EVERY_S = 0.02
_RETRY_REFUSED_S = 1.0
TEND_EVERY_S = 0.5
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a ready session is attached to. A plan is valid only with this boot id; a worker also wants an
    epoch of at least its own. The scheduler's has no arena."""

    boot_id: BootId
    epoch: int
    geometry: Geometry
    arena: arena.Arena | None
    connection: Connection


class Session:
    """Common to both halves. start() begins the thread; close() ends it."""

    def __init__(self, path: Path, engine: EngineKey, role: Role) -> None:
        self.attachment: Attachment | None = None
        """None unless ready. Read it once per use."""
        self.refusal: str | None = None
        """Why the server does not serve this engine, for the user; it is asked again every second."""
        self.state = State.ABSENT
        self._path = path
        self._engine = engine
        self._role: Role = role
        self._mail = Mail()
        self._closing = False
        self._has_searched = False
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=f"kvmosaic-{role}", daemon=True)
        _abandon_in_children(self)

    def start(self) -> None:
        """Begin to attach; returns at once."""
        self._thread.start()

    def wait_settled(self, timeout_s: float) -> State:
        """Wait until it is ready or refused, or known that nobody listens; then (or late) the state."""
        with self._changed:
            self._changed.wait_for(self._is_settled, timeout_s)
            return self.state

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until it is ready; also through an absent or refusing server."""
        with self._changed:
            self._changed.wait_for(lambda: self.state in (State.READY, State.CLOSED), timeout_s)
            return self.state is State.READY

    def post(self, message: Request, boot_id: BootId) -> None:
        """Send a one-way message to this life of the server and to no other. Never waits, never raises."""
        self._mail.post(message, boot_id)

    def outdate(self, attachment: Attachment) -> None:
        """The server has said that this attachment's epoch is over: attach again on the same connection."""
        with self._changed:
            if self.attachment is attachment:
                self.attachment = None
                self._wake()

    def close(self) -> None:
        """End the thread and the connection, within about a second. Idempotent."""
        with self._changed:
            if self.state is State.CLOSED:
                return
            self._closing = True
            self._wake()
        if self._thread.ident is None:
            self._end()
        else:
            self._thread.join(_JOIN_TIMEOUT_S)

    def check(self) -> None:
        """An attachment exists only while ready."""
        with self._changed:
            assert self.attachment is None or self.state is State.READY
        self._mail.check()

    # What a worker adds to a life. The base is complete without.

    def _declare(self, connection: Connection) -> None:
        """Say what there is to attach. Raises Refused."""

    def _request(self) -> Attach:
        """How to ask for the attachment."""
        return Attach(0)

    def _map(self, reply: Attached, fd: int | None) -> arena.Arena | None:
        """Take over the descriptor. Raises Refused when it cannot be used."""
        return None

    def _announce(self, attachment: Attachment) -> None:
        """`attachment` is published: the others may be told."""

    def _prepare(self, attachment: Attachment) -> float:
        """Do some work ahead of the copies; how long to rest after it."""
        return TEND_EVERY_S

    def _drop(self, attachment: Attachment) -> None:
        """`attachment` is no longer published: end its use and give it back."""

    def _part(self, connection: Connection) -> None:
        """The last word of an orderly end."""

    # The thread. Each stage ends by an exception when the connection or the session does.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._pause(self._try_to_live())
        finally:
            self._end()

    def _try_to_live(self) -> float:
        """A fault of ours must not end the cache for as long as the engine lives."""
        try:
            return self._live()
        except Exception:  # the boundary of the engine
            logger.exception("the session with %s failed; it begins anew", self._path)
            self._lose()
            return _RETRY_REFUSED_S

    def _live(self) -> float:
        """One connection, from its beginning to its loss. Returns how long to wait before the next."""
        try:
            self._connection = connection = Connection.connect(self._path)
        except ServerLost:
            self._lose()
            return _SEARCH_EVERY_S
        try:
            boot_id = connection.hello(self._role, self._engine, _REPLY_TIMEOUT_S)
            self._mail.open(connection, boot_id)
            self._happen(Event.WELCOMED)
            while True:
                self._serve(connection)
        except Refused as error:
            self._refuse(error)
            return _RETRY_REFUSED_S
        except MosaicError as error:
            logger.debug("connection to %s ended: %s", self._path, error)
            self._lose()
            return _SEARCH_EVERY_S
        finally:
            if self._closing:
                self._part(connection)
            self._mail.close()
            connection.close()

    def _serve(self, connection: Connection) -> None:
        """One attachment, from asking for it to its end."""
        try:
            attachment = self._attach(connection)
        except Refused as error:
            self._refuse(error)
            self._rest(connection, _RETRY_REFUSED_S)
            return
        event = Event.GONE
        self._publish(attachment)
        try:
            self._announce(attachment)
            while self.attachment is attachment:
                self._rest(connection, self._prepare(attachment))
                connection.tend()
            event = Event.OUTDATED
        finally:
            self._withdraw(attachment, event)

    def _attach(self, connection: Connection) -> Attachment:
        self._declare(connection)
        while True:
            reply, fd = self._ask(connection, self._request())
            if isinstance(reply, Attached):
                mapping = self._map(reply, fd)
                return Attachment(BootId(reply.boot_id), reply.epoch, reply.geometry, mapping, connection)
            expect_attaching(reply)
            self._rest(connection, _ATTACH_EVERY_S)

    def _ask(self, connection: Connection, message: Request) -> tuple[Reply, int | None]:
        """Ask again and again: a server that is only slow must not be left."""
        while True:
            try:
                return connection.request_with_fd(message, _REPLY_TIMEOUT_S)
            except DeadlinePassed:
                self._check_closing()

    def _rest(self, connection: Connection, timeout_s: float) -> None:
        """Wait, but not past the end of the connection or of the session, nor past outdate()."""
        if connection.wait_closed(timeout_s, self._wake_fd):
            raise ServerLost("the server closed the connection")
        self._clear_wake()
        self._check_closing()

    def _check_closing(self) -> None:
        if self._closing:
            raise ServerLost("the session is being closed")

    def _pause(self, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        poller.poll(timeout_s * 1000)
        self._clear_wake()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _clear_wake(self) -> None:
        with self._changed, suppress(BlockingIOError):
            if not self._closing:
                os.eventfd_read(self._wake_fd)

    # What changes is changed under `_changed`.

    def _is_settled(self) -> bool:
        if self.state is State.ABSENT:
            return self._has_searched
        return self.state in (State.REFUSED, State.READY, State.CLOSED)

    def _happen(self, event: Event) -> None:
        with self._changed:
            self.state = NEXT[self.state][event]
            if self.state is not State.REFUSED:
                self.refusal = None
            self._changed.notify_all()

    def _publish(self, attachment: Attachment) -> None:
        with self._changed:
            self._happen(Event.ATTACHED)
            self.attachment = attachment
        logger.info("attached to boot %s at %s", attachment.boot_id, self._path)

    def _withdraw(self, attachment: Attachment, event: Event) -> None:
        with self._changed:
            self.attachment = None
            self._happen(event)
        if event is Event.GONE and not self._closing:
            logger.warning("the server at %s is gone; nothing is cached until it is back", self._path)
        self._drop(attachment)
        if event is Event.GONE:
            self._happen(Event.ENDED)

    def _lose(self) -> None:
        with self._changed:
            self._has_searched = True
            self._happen(Event.GONE)

    def _refuse(self, error: Refused) -> None:
        reason = str(error)
        if self.refusal != reason:
            logger.error("the server at %s does not serve this engine: %s", self._path, reason)
        with self._changed:
            self._happen(Event.REFUSED)
            self.refusal = reason

    def _end(self) -> None:
        with self._changed:
            self._happen(Event.CLOSED)
            os.close(self._wake_fd)

    def _abandon(self) -> None:
        """In a forked child: locks may be held by threads that do not exist here."""
        if self.state is State.CLOSED:
            return
        self._changed = threading.Condition()
        self._mail = Mail()
        self.attachment = None
        self.state = State.CLOSED
        if self._connection is not None:
            self._connection.close_in_child()
        os.close(self._wake_fd)


def expect_attaching(reply: Reply) -> None:
    match reply:
        case Attaching():
            return
        case Refusal(reason=reason) | Failed(reason=reason):
            raise Refused(reason)
        case _:
            raise RemoteProtocolError(f"the server answered an attaching engine with {type(reply).__name__}")


def _abandon_in_children(session: Session) -> None:
    """A child that kept the socket would hide its parent's death, and a child's message would be the parent's.

    Registered for ever, so it must not keep the session alive.
    """
    reference = weakref.ref(session)

    def after_in_child() -> None:
        if (kept := reference()) is not None:
            kept._abandon()

    os.register_at_fork(after_in_child=after_in_child)
