import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kvmosaic.client.connection import Connection
from kvmosaic.memory import arena as arenas
from kvmosaic.protocol.codec import Decoder, encode, reply_decoder
from kvmosaic.protocol.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Attach,
    Attached,
    Attaching,
    Commit,
    Declare,
    Failed,
    Hello,
    Lookup,
    Mapped,
    Miss,
    Release,
    Reply,
    Request,
    Reserve,
    Reserved,
    Role,
    Status,
    StatusReport,
)
from kvmosaic.server.channel import MAX_OUTBOX_BYTES
from kvmosaic.server.loop import Loop
from kvmosaic.testing.serving import wait_until
from tests.server.kit import MIB, declaration, make_service
from tests.server.test_service import lookup, reserve

TIMEOUT_S = 5.0


class RunningLoop:
    """A loop on a thread of this process, and connections to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.service = make_service()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        self._fd = arenas.create(64 * MIB)
        self.loop = Loop(listener, self._fd, self.service, time.monotonic)
        self._thread = threading.Thread(target=self.loop.run)
        self._thread.start()
        self._connections: list[Connection] = []

    def connect(self, role: Role, engine: str = "engine") -> Connection:
        connection = Connection.connect(self.path)
        self._connections.append(connection)
        connection.hello(role, "" if role == "operator" else engine, TIMEOUT_S)
        return connection

    def raw(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(self.path))
        sock.settimeout(TIMEOUT_S)
        return sock

    def report(self) -> dict[str, Any]:
        connection = self.connect("operator")
        reply = connection.request(Status(0), TIMEOUT_S)
        connection.close()
        assert isinstance(reply, StatusReport)
        return reply.report

    def on_loop(self, call: Callable[[], None]) -> None:
        """Run something on the loop's thread and wait for it."""
        done = threading.Event()

        def run() -> None:
            call()
            done.set()

        self.loop.post(run)
        assert done.wait(TIMEOUT_S)

    def end(self) -> None:
        for connection in self._connections:
            connection.close()
        self.on_loop(self.loop.check)
        self.loop.stop()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        self.loop.close()
        os.close(self._fd)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningLoop]:
    running = RunningLoop(tmp_path / "s.sock")
    yield running
    running.end()


def ready_scheduler(running: RunningLoop, engine: str = "engine") -> tuple[Connection, int]:
    """A scheduler of a complete engine, and its epoch."""
    worker = running.connect("worker", engine)
    assert isinstance(worker.request(Declare(0, declaration()), TIMEOUT_S), Attaching)
    reply, fd = worker.request_with_fd(Attach(0), TIMEOUT_S)
    assert isinstance(reply, Attached)
    assert fd is not None
    os.close(fd)
    worker.post(Mapped(0, reply.epoch))
    scheduler = running.connect("scheduler", engine)
    attached: list[Attached] = []

    def is_attached() -> bool:
        answer = scheduler.request(Attach(0), TIMEOUT_S)
        if isinstance(answer, Attached):
            attached.append(answer)
        return bool(attached)

    wait_until(is_attached)
    return scheduler, attached[0].epoch


def replies_until_end(sock: socket.socket) -> list[Reply]:
    decoder: Decoder[Reply] = reply_decoder()
    replies: list[Reply] = []
    while True:
        try:
            data = sock.recv(1 << 16)
        except ConnectionResetError:
            return replies
        if not data:
            return replies
        replies += decoder.feed(data)


def test_a_worker_gets_the_arena_and_a_scheduler_does_not(running: RunningLoop) -> None:
    worker = running.connect("worker")
    worker.request(Declare(0, declaration()), TIMEOUT_S)
    reply, fd = worker.request_with_fd(Attach(0), TIMEOUT_S)
    assert isinstance(reply, Attached)
    assert fd is not None
    arena = arenas.attach(fd, reply.arena_bytes)
    os.close(fd)
    worker.post(Mapped(0, reply.epoch))
    scheduler = running.connect("scheduler")
    answer, nothing = scheduler.request_with_fd(Attach(0), TIMEOUT_S)
    assert isinstance(answer, Attached)
    assert nothing is None
    arena.close()


@pytest.mark.parametrize(
    ("noise", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "announced a frame"),
        (struct.pack("<I", MAX_FRAME_BYTES + 1), str(MAX_FRAME_BYTES + 1)),
        (struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1", "cannot be read"),
        (struct.pack("<I", 0), "cannot be read"),
        (encode(Status(7)), "before Hello"),
        (encode(Hello(7, PROTOCOL + 1, "worker", "e")), f"protocol {PROTOCOL + 1} and this server {PROTOCOL}"),
    ],
)
def test_a_session_that_breaks_the_protocol_is_told_why_and_closed_alone(
    running: RunningLoop, noise: bytes, reason: str
) -> None:
    scheduler, epoch = ready_scheduler(running)
    with running.raw() as sock:
        sock.sendall(noise)
        (reply,) = replies_until_end(sock)
    assert isinstance(reply, Failed)
    assert reason in reply.reason
    assert scheduler.request(lookup(epoch, 1), TIMEOUT_S) == Miss(scheduler_id(scheduler), 0)


def scheduler_id(connection: Connection) -> int:
    return connection._last_id


def test_a_client_of_another_protocol_learns_both_numbers(running: RunningLoop) -> None:
    connection = Connection.connect(running.path)
    reply = connection.request(Hello(0, 99, "worker", "e"), TIMEOUT_S)
    connection.close()
    assert isinstance(reply, Failed)
    assert "99" in reply.reason


def test_a_fault_in_one_request_is_a_reply_and_ends_nothing(
    running: RunningLoop, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, epoch = ready_scheduler(running)

    def fault(*_args: object) -> None:
        raise RuntimeError("a bug")

    real = running.service._cache.lookup
    running.service._cache.lookup = fault  # type: ignore[assignment, method-assign]  # no bug is known
    reply = scheduler.request(lookup(epoch, 1), TIMEOUT_S)
    assert isinstance(reply, Failed)
    assert "a bug" in caplog.text
    running.service._cache.lookup = real  # type: ignore[method-assign]
    assert isinstance(scheduler.request(lookup(epoch, 1), TIMEOUT_S), Miss)


def test_a_peer_that_does_not_read_costs_bounded_memory_and_nobody_else_anything(running: RunningLoop) -> None:
    scheduler, epoch = ready_scheduler(running)
    with running.raw() as sock:
        sock.sendall(encode(Hello(1, PROTOCOL, "operator")))
        sock.settimeout(0.2)
        last_sent = 1
        with suppress(TimeoutError):
            while sock.send(encode(Status(last_sent + 1))):
                last_sent += 1
        wait_until(lambda: any(channel.congested for channel in running.loop._channels))
        for _ in range(100):
            assert isinstance(scheduler.request(lookup(epoch, 1), TIMEOUT_S), Miss)
        assert all(channel._outbox_bytes < MAX_OUTBOX_BYTES + 4096 for channel in running.loop._channels)

        # It is served again as soon as it reads, and has lost nothing.
        decoder, received = reply_decoder(), 0
        while received < last_sent:
            for reply in decoder.feed(sock.recv(1 << 20)):
                received += 1
                assert reply.id == received


def test_a_flood_of_one_session_does_not_delay_the_others(running: RunningLoop) -> None:
    scheduler, epoch = ready_scheduler(running)
    with running.raw() as sock:
        sock.sendall(encode(Hello(1, PROTOCOL, "scheduler", "other")) + encode(Release(0, "r")) * 50_000)
        started = time.monotonic()
        assert isinstance(scheduler.request(lookup(epoch, 1), TIMEOUT_S), Miss)
        assert time.monotonic() - started < 0.1, "all 50,000 take longer than that"


def test_words_said_before_the_socket_was_closed_count(running: RunningLoop) -> None:
    """The reply to the lookup cannot be sent any more; the commit after it is carried out all the same."""
    scheduler, epoch = ready_scheduler(running)
    reserved = scheduler.request(reserve(epoch, 2), TIMEOUT_S)
    assert isinstance(reserved, Reserved)
    scheduler.close()
    with running.raw() as sock:
        words: list[Request] = [
            Hello(1, PROTOCOL, "scheduler", "engine"),
            lookup(epoch, 1),
            Commit(0, reserved.reservation, b"\1\1"),
        ]
        sock.sendall(b"".join(map(encode, words)))
    wait_until(lambda: running.report()["objects"] == 2)


PEER = """
import os, signal, socket, sys
sys.path.insert(0, os.getcwd())
from kvmosaic.protocol.codec import encode, reply_decoder
from kvmosaic.protocol.messages import *
from tests.server.kit import declaration
from tests.server.test_service import reserve

def session(role):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(sys.argv[1])
    sock.sendall(encode(Hello(1, PROTOCOL, role, "doomed")))
    return sock, reply_decoder()

def reply(sock, decoder, request=None):
    if request:
        sock.sendall(encode(request))
    while True:
        for message in decoder.feed(sock.recv(1 << 16)):
            return message

worker, scheduler = session("worker"), session("scheduler")
reply(*worker), reply(*scheduler)
reply(*worker, Declare(2, declaration()))
epoch = reply(*worker, Attach(3)).epoch
worker[0].sendall(encode(Mapped(0, epoch)))
assert isinstance(reply(*worker, Status(4)), StatusReport)
reserved = reply(*scheduler, reserve(epoch, 3))
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
for _ in sys.stdin:
    scheduler[0].sendall(encode(Release(0, "r")) * 1000 + encode(Commit(0, reserved.reservation, bytes([1, 1, 1]))))
    print(flush=True)
"""


class DoomedEngine:
    """Another process that is an engine with a reservation of three objects. A child of it holds its sockets."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-c", PEER, str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._child = int(self._stdout.readline())

    def commit(self) -> None:
        """Send a thousand releases and then the commit."""
        self._stdin.write("\n")
        self._stdin.flush()
        self._stdout.readline()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self.kill()
        os.kill(self._child, signal.SIGKILL)
        self._stdin.close()
        self._stdout.close()


@pytest.fixture
def doomed(running: RunningLoop) -> Iterator[DoomedEngine]:
    engine = DoomedEngine(running.path)
    yield engine
    engine.end()


@pytest.mark.slow
def test_a_killed_engine_is_buried_at_once_though_its_child_holds_the_socket(
    running: RunningLoop, doomed: DoomedEngine
) -> None:
    assert running.report()["reservations"] == 1
    doomed.kill()
    wait_until(lambda: running.report()["reservations"] == 0, 1.0)
    report = running.report()
    assert (report["sessions"], report["quarantined"], report["engines"]) == (0, 0, [])
    assert report["objects"] == 0


@pytest.mark.slow
def test_the_last_words_of_a_killed_engine_count(running: RunningLoop, doomed: DoomedEngine) -> None:
    def while_the_loop_stands_still() -> None:
        doomed.commit()
        doomed.kill()

    running.on_loop(while_the_loop_stands_still)
    wait_until(lambda: running.report()["engines"] == [], 1.0)
    assert running.report()["objects"] == 3


@pytest.mark.slow
def test_sessions_and_processes_leave_no_descriptor(running: RunningLoop) -> None:
    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    running.report()
    gc.collect()  # what earlier tests left must not go while we count
    before = num_descriptors()
    for _ in range(20):
        running.report()
    passing = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); input()"
    visitors = [
        subprocess.Popen([sys.executable, "-S", "-c", passing, str(running.path)], stdin=subprocess.PIPE)
        for _ in range(3)
    ]
    wait_until(lambda: num_descriptors() >= before + 3 * 3)  # a pipe, a socket and a pidfd each
    for visitor in visitors:
        visitor.communicate(b"\n")
    wait_until(lambda: num_descriptors() <= before)


def test_without_free_descriptors_sessions_wait_and_are_let_in_later(running: RunningLoop) -> None:
    scheduler, epoch = ready_scheduler(running)
    hoard: list[int] = []
    late = running.raw()
    late.close()
    try:
        while True:
            hoard.append(os.dup(0))
    except OSError:
        pass
    try:
        os.close(hoard.pop())
        late = running.raw()
        assert isinstance(scheduler.request(lookup(epoch, 1), TIMEOUT_S), Miss)
    finally:
        for fd in hoard:
            os.close(fd)
    late.sendall(encode(Hello(1, PROTOCOL, "operator")))
    assert late.recv(100)
    late.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
@pytest.mark.slow
def test_another_user_is_turned_away() -> None:
    with TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        running = RunningLoop(Path(directory) / "s.sock")
        running.path.chmod(0o777)
        try:
            code = (
                "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
                "s.connect(sys.argv[1]); print(s.recv(200))"
            )
            command = [sys.executable, "-c", code, str(running.path)]
            answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        finally:
            running.end()
    assert "uid 65534 may not use the server of uid 0" in answer


def test_a_long_prompt_travels_both_ways(running: RunningLoop) -> None:
    scheduler, epoch = ready_scheduler(running)
    reply = scheduler.request(Lookup(0, epoch, "r", 0, 32, os.urandom(32 * 100_000)), TIMEOUT_S)
    assert isinstance(reply, Miss)
    wanted = struct.pack("<I", 1) * 30_000
    chains = reserve(epoch, 30_000).chains
    assert len(chains[0].wanted) == len(wanted)
    reserved = scheduler.request(Reserve(0, epoch, chains), TIMEOUT_S)
    assert isinstance(reserved, Reserved)
    assert len(reserved.outcomes) == 30_000
