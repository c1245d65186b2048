"""A real server process for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Poll until the condition is true; AssertionError at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.005)


class ServerProcess:
    """`kvmosaic server` in its own process; small enough to be resident at once unless `large`."""

    def __init__(self, socket: Path, size_gb: float = 0.25, *flags: str, large: bool = False) -> None:
        self.socket = socket
        self._large = large
        command = [sys.executable, "-m", "kvmosaic", "server", "--l1-size-gb", str(size_gb), "--http", "off"]
        self._command = [*command, "--socket", str(socket), *flags]
        self._log = socket.with_suffix(".log")
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with self._log.open("ab") as log:
            process = subprocess.Popen(self._command, env=environ, stdout=log, stderr=log)
        wait_until(lambda: process.poll() is not None or self._listens())
        assert process.poll() is None, self.log()
        if not self._large:
            wait_until(lambda: self.status()["usable_bytes"] == self.status()["capacity_bytes"])
        return process

    def _listens(self) -> bool:
        from kvmosaic.client import Connection
        from kvmosaic.errors import ServerLost

        try:
            Connection.connect(self.socket).close()
        except ServerLost:
            return False
        return True

    def log(self) -> str:
        return self._log.read_text()

    def restart(self) -> None:
        self.kill()
        self.process = self._start()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def status(self) -> dict[str, Any]:
        from kvmosaic.client import Connection
        from kvmosaic.protocol.messages import Status, StatusReport

        connection = Connection.connect(self.socket)
        try:
            connection.hello("operator", "", 5.0)
            reply = connection.request(Status(0), 5.0)
        finally:
            connection.close()
        assert isinstance(reply, StatusReport)
        return reply.report

    def close(self) -> None:
        if self.process.poll() is None:
            self.resume()
            self.process.terminate()
            self.process.wait(10)


def counts(report: dict[str, Any]) -> str:
    """For assertion messages."""
    return json.dumps({key: value for key, value in report.items() if isinstance(value, int | float)})
