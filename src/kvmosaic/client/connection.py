"""One socket to the server: requests with a deadline, one-way messages that never wait.

A late reply is recognised by its id and dropped, so a deadline never costs the connection. May be used by several
threads: one of them asks at a time, `post` waits for none. Knows neither life cycles nor retries (see session).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvmosaic.core.types import BootId
from kvmosaic.protocol.messages import Reply, Request, Role

LateReply = Callable[[Reply], None]


class Connection:
    """See the module. Every method but close() raises ServerLost once the connection is gone."""

    @classmethod
    def connect(cls, path: Path) -> Connection:
        """ServerLost when nobody listens."""
        raise NotImplementedError

    def hello(self, role: Role, engine: str, timeout_s: float) -> BootId:
        """Introduce this side. Refused when the server does not talk to it, DeadlinePassed, ServerLost."""
        raise NotImplementedError

    def request(self, message: Request, timeout_s: float, on_late: LateReply | None = None) -> Reply:
        """Send a request (its id is given here) and wait for its reply, `Failed` included.

        Raises DeadlinePassed; a reply that comes later goes to `on_late`, on whichever thread reads it.
        """
        raise NotImplementedError

    def request_with_fd(self, message: Request, timeout_s: float) -> tuple[Reply, int | None]:
        """The same for a reply that carries a descriptor, which then belongs to the caller."""
        raise NotImplementedError

    def post(self, message: Request) -> None:
        """Send a one-way message; never waits."""
        raise NotImplementedError

    def close(self) -> None:
        """A second call does nothing."""
        raise NotImplementedError
