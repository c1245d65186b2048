"""A real server process for tests: `kvmosaic server`, from the same sources as this module.

Owned by one test or one fuzz run, driven from one thread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvmosaic.client import Connection
from kvmosaic.errors import ServerLost
from kvmosaic.protocol.messages import Clear, Reply, Request, Status, StatusReport

SOURCES = Path(__file__).parents[2]
OPERATOR_TIMEOUT_S = 5.0


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Poll until the condition is true; AssertionError at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.005)


class ServerProcess:
    """`kvmosaic server` in its own process; small enough to be resident at once unless `large`. `program` are the
    arguments of python that stand for `kvmosaic`."""

    def __init__(
        self,
        socket: Path,
        size_gb: float = 0.25,
        *flags: str,
        large: bool = False,
        program: Sequence[str] = ("-m", "kvmosaic"),
    ) -> None:
        self.socket = socket
        self._large = large
        command = [sys.executable, *program, "server", "--l1-size-gb", str(size_gb), "--http", "off"]
        self._command = [*command, "--socket", str(socket), *flags]
        self._log = socket.with_suffix(".log")
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        search = os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self._log.open("ab") as log:
            process = subprocess.Popen(self._command, env={**os.environ, "PYTHONPATH": search}, stdout=log, stderr=log)
        wait_until(lambda: process.poll() is not None or self._listens(), 60)
        assert process.poll() is None, self.log()
        if not self._large:
            wait_until(self._is_resident, 60)
        return process

    def _listens(self) -> bool:
        try:
            Connection.connect(self.socket).close()
        except ServerLost:
            return False
        return True

    def _is_resident(self) -> bool:
        report = self.status()
        return bool(report["usable_bytes"] == report["capacity_bytes"])

    def log(self) -> str:
        return self._log.read_text()

    def start(self) -> None:
        """Another life, after kill()."""
        self.process = self._start()

    def restart(self) -> None:
        self.kill()
        self.start()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def status(self) -> dict[str, Any]:
        """The server's report, a JSON object."""
        reply = self.ask(Status(0))
        assert isinstance(reply, StatusReport)
        return reply.report

    def clear(self, model: str = "") -> None:
        """Forget one model, or everything, as an operator would."""
        self.ask(Clear(0, model))

    def ask(self, message: Request) -> Reply:
        connection = Connection.connect(self.socket)
        try:
            connection.hello("operator", "", OPERATOR_TIMEOUT_S)
            return connection.request(message, OPERATOR_TIMEOUT_S)
        finally:
            connection.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.resume()
            self.process.terminate()
            self.process.wait(10)
