import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmosaic.server import peers
from kvmosaic.server.peers import Processes
from kvmosaic.testing.serving import wait_until


class Meeting:
    """A listening socket that processes come to."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.processes = Processes()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.visitors: list[subprocess.Popen[bytes]] = []

    def accept(self) -> peers.Process:
        sock, _ = self.listener.accept()
        with sock:
            process = self.processes.meet(sock)
        self.processes.check()
        return process

    def come_ourselves(self) -> peers.Process:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self.path)
            return self.accept()

    def let_another_come(self) -> tuple[peers.Process, subprocess.Popen[bytes]]:
        code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); input()"
        visitor = subprocess.Popen([sys.executable, "-S", "-c", code, self.path], stdin=subprocess.PIPE)
        self.visitors.append(visitor)
        return self.accept(), visitor

    def end(self) -> None:
        for visitor in self.visitors:
            visitor.kill()
            visitor.communicate()
        for process in list(self.processes._by_identity.values()):
            self.processes.forget(process)
        self.listener.close()


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    meeting = Meeting(tmp_path / "s.sock")
    yield meeting
    meeting.end()


def test_a_process_is_met_once_however_often_it_connects(meeting: Meeting) -> None:
    first = meeting.come_ourselves()
    assert (first.pid, first.uid) == (os.getpid(), os.geteuid())
    before = len(os.listdir("/proc/self/fd"))
    assert meeting.come_ourselves() is first
    assert len(os.listdir("/proc/self/fd")) == before
    other, _ = meeting.let_another_come()
    assert other is not first
    assert len(meeting.processes) == 2


def test_death_is_proven_by_the_kernel(meeting: Meeting) -> None:
    process, visitor = meeting.let_another_come()
    assert process.pid == visitor.pid
    assert not process.is_dead()
    visitor.kill()
    wait_until(process.is_dead)


def test_a_forgotten_process_is_met_anew(meeting: Meeting) -> None:
    first = meeting.come_ourselves()
    before = len(os.listdir("/proc/self/fd"))
    meeting.processes.forget(first)
    meeting.processes.forget(first)
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert meeting.come_ourselves() is not first
    assert len(meeting.processes) == 1


def test_without_the_socket_option_the_pid_has_to_do(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_SO_PEERPIDFD", 9999)
    process, visitor = meeting.let_another_come()
    visitor.kill()
    wait_until(process.is_dead)


def test_without_any_pidfd_there_is_no_proof(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_SO_PEERPIDFD", 9999)
    monkeypatch.setattr(os, "pidfd_open", lambda pid: (_ for _ in ()).throw(OSError("too old")))
    process, visitor = meeting.let_another_come()
    assert process.pidfd is None
    visitor.kill()
    visitor.wait()
    assert not process.is_dead()
    assert len(meeting.processes) == 0


def test_where_only_pids_tell_processes_apart_a_dead_one_is_not_mistaken(meeting: Meeting) -> None:
    """Before Linux 6.9 all pidfds have one inode, and a pid may come back."""
    pidfd = os.pidfd_open(os.getpid())
    meeting.processes._anonymous_device = os.fstat(pidfd).st_dev
    os.close(pidfd)
    old, visitor = meeting.let_another_come()
    visitor.kill()
    wait_until(old.is_dead)
    ours = meeting.come_ourselves()
    assert meeting.come_ourselves() is ours
    meeting.processes._by_identity[0, ours.pid] = old
    newcomer = meeting.come_ourselves()
    assert newcomer not in (old, ours)
    meeting.processes.forget(ours)


def test_a_process_that_nothing_tells_apart_gets_no_proof(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another pid namespace has pid 0 here; before Linux 6.9 that is all there is."""
    monkeypatch.setattr(meeting.processes, "_identity", lambda pid, pidfd: (0, 0))
    assert meeting.come_ourselves().pidfd is None
