"""Real processes for the fault tests: a server and the parts of fake engines, each killed at the end."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from kvmosaic.client import Connection
from kvmosaic.errors import ServerLost
from kvmosaic.protocol.messages import Status, StatusReport

PATIENCE_S = 20.0


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> float:
    """Poll a condition that other processes bring about; how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)
    return time.monotonic() - began


class ServerProcess:
    """`python -m kvmosaic server` on one socket; may be killed and started again."""

    def __init__(self, socket: Path, size_gb: float = 0.0625) -> None:
        self.socket = socket
        self._size_gb = size_gb
        self._process: subprocess.Popen[bytes] | None = None
        self._log = socket.with_suffix(".log")

    def start(self) -> None:
        command = [sys.executable, "-m", "kvmosaic", "server", "--l1-size-gb", str(self._size_gb)]
        command += ["--socket", str(self.socket), "--http", "off"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_until(self._answers, f"the server answers; its log is {self._log}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def status(self) -> dict[str, Any]:
        """What an operator sees."""
        connection = Connection.connect(self.socket)
        try:
            connection.hello("operator", "", PATIENCE_S)
            reply = connection.request(Status(0), PATIENCE_S)
        finally:
            connection.close()
        assert isinstance(reply, StatusReport)
        return reply.report

    def wait_populated(self, timeout_s: float = PATIENCE_S) -> float:
        """Until all of the arena may be used."""
        return wait_until(
            lambda: (report := self.status())["usable_bytes"] == report["capacity_bytes"], "populated", timeout_s
        )

    def num_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def resident_bytes(self) -> int:
        """Without the arena, which is shared memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        anonymous = re.search(r"RssAnon:\s+(\d+) kB", status)
        assert anonymous is not None
        return int(anonymous[1]) << 10

    def log(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        try:
            self.status()
        except ServerLost:
            return False
        return True


class EngineProcess:
    """One process of a fake engine."""

    def __init__(self, socket: Path, engine: str = "engine", **options: object) -> None:
        command = [sys.executable, "-m", "kvmosaic.testing.fake_engine", "--socket", str(socket)]
        command += ["--engine", engine]
        for name, value in options.items():
            flag = "--" + name.replace("_", "-")
            command += [flag] if value is True else [flag, str(value)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def wait_ready(self) -> None:
        """Until every half in it is attached."""
        if not self.ask("wait_ready"):
            self.kill()
            pytest.fail("the fake engine was not attached in time")

    def ask(self, name: str, **arguments: object) -> Any:
        """Carry out a command."""
        self.tell(name, **arguments)
        return self.answer()

    def tell(self, name: str, **arguments: object) -> None:
        """Send a command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = PATIENCE_S) -> Any:
        """The answer to the oldest command that has none."""
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], timeout_s)[0], "the fake engine does not answer"
        line = self._process.stdout.readline()
        assert line, "the fake engine has died"
        return json.loads(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is dead."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
