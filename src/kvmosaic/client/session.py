"""The life of one process half's session with the server: absent, attaching, ready, lost, attaching again.

One daemon thread per session connects, introduces, attaches and watches, for ever, so nobody else waits for a server.
Others read `attachment` (one atomic read, an immutable value) and post one-way messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvmosaic.client.connection import Connection
from kvmosaic.core.types import BootId, EngineKey
from kvmosaic.layout.groups import Declaration, Geometry
from kvmosaic.memory.arena import Arena


class State(Enum):
    """Where a session is in its life."""

    ABSENT = "absent"
    ATTACHING = "attaching"
    REFUSED = "refused"
    READY = "ready"
    LOST = "lost"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a ready session is attached to. A plan is valid only with this boot id; a worker also wants an epoch of
    at least its own. The scheduler's has no arena."""

    boot_id: BootId
    epoch: int
    geometry: Geometry
    arena: Arena | None
    connection: Connection


class Session:
    """Common to both halves. start() begins the thread; close() ends it."""

    attachment: Attachment | None
    """None unless ready. Read it once per use."""
    refusal: str | None
    """Why the server does not serve this engine, for the user; it is asked again every second."""
    state: State

    def start(self) -> None:
        """Begin to attach; returns at once."""

    def wait_settled(self, timeout_s: float) -> State:
        """Wait until it is ready or refused, or known that nobody listens; then (or late) the state."""
        raise NotImplementedError

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until it is ready; also through an absent or refusing server."""
        raise NotImplementedError

    def close(self) -> None:
        """End the thread and the connection, within about a second. Idempotent."""


class WorkerSession(Session):
    """A worker's: declares its rank and maps the arena.

    `on_lost` is called on the session's thread when the attachment is gone, also at close(). It ends the copies of
    this process and returns only when the last one has ended: right after it the arena is unmapped.
    """

    def __init__(
        self, path: Path, engine: EngineKey, declaration: Declaration, on_lost: Callable[[], None]
    ) -> None: ...


class SchedulerSession(Session):
    """The scheduler's: asks for the geometry once all ranks have mapped the arena."""

    def __init__(self, path: Path, engine: EngineKey) -> None: ...
