"""One-way messages on their way to one life of the server: it gets them as long as it lives, and no other does.

What may have been lost with a connection goes out again on the next one (the server ignores what it has seen), and
messages for a dead server are dropped. Used by any thread; its lock comes before the connection's. Never waits.
"""

from __future__ import annotations

import threading
from collections import deque

from kvmosaic.client.connection import Connection
from kvmosaic.core.types import BootId
from kvmosaic.errors import ServerLost
from kvmosaic.protocol.messages import Request

# Each message ends a lease or a reservation that was granted; only a bug makes so many of them wait.
_MAX_WAITING = 1 << 16


class Mail:
    """Between open() and close() messages leave at once; otherwise they wait for the next open()."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._boot_id: BootId | None = None
        self._waiting: deque[tuple[BootId, Request]] = deque(maxlen=_MAX_WAITING)
        self._unconfirmed: deque[tuple[int, Request]] = deque(maxlen=_MAX_WAITING)

    def open(self, connection: Connection, boot_id: BootId) -> None:
        """Send what waits for this boot, drop what waits for others."""
        with self._lock:
            self._connection, self._boot_id = connection, boot_id
            waiting = list(self._waiting)
            self._waiting.clear()
            for wanted_boot_id, message in waiting:
                self._send(message, wanted_boot_id)

    def post(self, message: Request, boot_id: BootId) -> None:
        """Send it, or keep it until its server is seen again."""
        with self._lock:
            self._send(message, boot_id)

    def close(self) -> None:
        """The connection is gone: what the server may not have seen waits for the next."""
        with self._lock:
            if self._connection is not None and self._boot_id is not None:
                self._forget_confirmed(self._connection)
                while self._unconfirmed:
                    self._waiting.appendleft((self._boot_id, self._unconfirmed.pop()[1]))
            self._connection = None

    def check(self) -> None:
        """Nothing waits for a server that is known to be dead."""
        with self._lock:
            if self._connection is not None:
                assert all(boot_id == self._boot_id for boot_id, _ in self._waiting)

    def _send(self, message: Request, boot_id: BootId) -> None:
        if self._connection is None:
            self._waiting.append((boot_id, message))
        elif boot_id == self._boot_id:
            try:
                self._unconfirmed.append((self._connection.post(message), message))
            except ServerLost:
                self._waiting.append((boot_id, message))
            self._forget_confirmed(self._connection)

    def _forget_confirmed(self, connection: Connection) -> None:
        while self._unconfirmed and self._unconfirmed[0][0] < connection.answered_id:
            self._unconfirmed.popleft()
