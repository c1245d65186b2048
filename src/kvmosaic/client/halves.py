"""The sessions of an engine's two halves: what each adds to the life that all sessions share.

A worker declares its rank, maps the arena and spares its first copies their page faults; the scheduler says which
weights the engine computes with. Everything here runs on the session's own thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvmosaic.client.connection import Connection
from kvmosaic.client.session import TEND_EVERY_S, Attachment, Session, expect_attaching
from kvmosaic.core.types import EngineKey
from kvmosaic.errors import Refused, ServerLost
from kvmosaic.layout.groups import Declaration
from kvmosaic.memory import arena
from kvmosaic.protocol.messages import Attach, Attached, Declare, Detach, Mapped

_PREPARE_EVERY_S = 0.1
_PREPARE_BYTES = 16 << 20


class WorkerSession(Session):
    """A worker's: declares its rank and maps the arena.

    `on_lost` is called on the session's thread after `attachment` became None, also at close(). It returns only
    when the last copy of this process has ended: right after it the arena is unmapped. So a copy must count as
    running before it reads `attachment`.
    """

    def __init__(self, path: Path, engine: EngineKey, declaration: Declaration, on_lost: Callable[[], None]) -> None:
        super().__init__(path, engine, "worker")
        self._declaration = declaration
        self._on_lost = on_lost
        self._prepared_bytes = 0

    def _declare(self, connection: Connection) -> None:
        """Only called while no copy runs: the server takes it as the worker's word for that."""
        reply, _ = self._ask(connection, Declare(0, self._declaration))
        expect_attaching(reply)

    def _map(self, reply: Attached, fd: int | None) -> arena.Arena | None:
        if fd is None:
            raise Refused("the server sent no descriptor of its arena")
        try:
            return arena.attach(fd, reply.arena_bytes)
        except OSError as error:
            raise Refused(f"the arena of {reply.arena_bytes} bytes cannot be mapped: {error}") from error
        finally:
            # Only the mapping may hold the memory: it goes the moment the mapping does.
            os.close(fd)

    def _announce(self, attachment: Attachment) -> None:
        attachment.connection.post(Mapped(0, attachment.epoch))

    def _prepare(self, attachment: Attachment) -> float:
        """Spare the first copies their page faults, as far as the server has made the arena resident."""
        mapping = attachment.arena
        assert mapping is not None, "a worker has mapped the arena"
        step = min(_PREPARE_BYTES, mapping.num_bytes - self._prepared_bytes)
        if not step:
            return TEND_EVERY_S
        if not mapping.map_resident(self._prepared_bytes, step):
            return _PREPARE_EVERY_S
        self._prepared_bytes += step
        return 0.0

    def _drop(self, attachment: Attachment) -> None:
        self._prepared_bytes = 0
        self._on_lost()
        assert attachment.arena is not None, "a worker has mapped the arena"
        attachment.arena.close()

    def _part(self, connection: Connection) -> None:
        with suppress(ServerLost):
            connection.post(Detach(0))


class SchedulerSession(Session):
    """The scheduler's: asks for the geometry once all ranks have mapped the arena."""

    def __init__(self, path: Path, engine: EngineKey) -> None:
        super().__init__(path, engine, "scheduler")
        self.weights = ""
        """See protocol.messages.Attach; whoever changes it clears or outdates the attachment."""

    def _request(self) -> Attach:
        return Attach(0, self.weights)
