"""The servers of a fuzz run: one of each kind, started when it is first needed, some with little room.

A server's arena cannot be as small as a short schedule needs it to evict, so most of it is reserved by an engine
that never writes: the ballast.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvmosaic.core.types import EngineKey
from kvmosaic.testing.fake_engine import FakeRank, FakeScheduler, declare
from kvmosaic.testing.serving import ServerProcess
from kvmosaic.testing.workload import SERVERS

MIB = 1 << 20
READY_S = 20.0


class Ballast:
    """Holds a reservation of so many MiB."""

    def __init__(self, server: ServerProcess, mib: int, chunk_tokens: int) -> None:
        key = EngineKey("ballast")
        self._mib = mib
        declared = declare("full", 0, 1, MIB * 16 // chunk_tokens)
        self._rank = FakeRank(server.socket, key, declared)
        self._scheduler = FakeScheduler(server.socket, key)
        self.fill()

    def fill(self) -> None:
        for session in (self._rank.session, self._scheduler.session):
            assert session.wait_ready(READY_S), "the ballast found no server"
        plan = self._scheduler.reserve(0, 0, self._mib)
        assert plan is not None, "the ballast was not answered"
        assert len(plan["objects"]) == self._mib, f"the ballast got {plan['outcomes']}"

    def close(self) -> None:
        self._scheduler.session.close()
        self._rank.session.close()


class Servers:
    """`program` are the arguments of python that stand for `kvmosaic`."""

    def __init__(self, folder: Path, program: Sequence[str] = ("-m", "kvmosaic")) -> None:
        self.folder = folder
        self._program = program
        self._running: dict[str, ServerProcess] = {}
        self._ballasts: dict[str, Ballast] = {}

    def get(self, name: str) -> ServerProcess:
        if name not in self._running:
            kind = SERVERS[name]
            socket = self.folder / f"{len(self._running)}.sock"
            server = ServerProcess(socket, kind.mib / 1024, "--chunk-size", kind.chunk, program=self._program)
            self._running[name] = server
            if kind.ballast_mib:
                self._ballasts[name] = Ballast(server, kind.ballast_mib, int(kind.chunk))
        return self._running[name]

    def ballast(self, name: str) -> int:
        """How many reservations are the ballast's."""
        return int(name in self._ballasts)

    def refill(self, name: str) -> None:
        """After a restart."""
        if name in self._ballasts:
            self._ballasts[name].fill()

    def close(self) -> None:
        for ballast in self._ballasts.values():
            ballast.close()
        for server in self._running.values():
            server.close()
