import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvmosaic.client import SchedulerSession, WorkerSession
from kvmosaic.client.lifecycle import State
from kvmosaic.client.session import Session
from kvmosaic.core.types import BootId, EngineKey
from kvmosaic.memory import arena
from kvmosaic.protocol.messages import (
    Attach,
    Attached,
    Attaching,
    Declare,
    Detach,
    Failed,
    Mapped,
    Refusal,
    Release,
)
from tests.client.peers import DECLARATION, GEOMETRY, PATIENCE_S, Listener, Peer, wait_until

ENGINE = EngineKey("engine")
ARENA_BYTES = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.sock"


@pytest.fixture
def arena_fd() -> Iterator[int]:
    fd = arena.create(ARENA_BYTES)
    yield fd
    os.close(fd)


@pytest.fixture
def scheduler(path: Path) -> Iterator[SchedulerSession]:
    session = SchedulerSession(path, ENGINE)
    yield session
    session.check()
    session.close()


class Worker:
    """A worker session whose copies end when the test says so."""

    def __init__(self, path: Path) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.num_losses = 0
        self.attachment_at_loss: object = "never called"
        self.session = WorkerSession(path, ENGINE, DECLARATION, self._on_lost)

    def _on_lost(self) -> None:
        self.attachment_at_loss = self.session.attachment
        self.num_losses += 1
        assert self.may_end.wait(PATIENCE_S)


@pytest.fixture
def worker(path: Path) -> Iterator[Worker]:
    worker = Worker(path)
    yield worker
    worker.may_end.set()
    worker.session.close()


def take(peer: Peer, kind: type) -> int:
    """The id of the next message, which must be of this kind."""
    message = peer.take()
    assert isinstance(message, kind), message
    return int(message.id)


def attach(peer: Peer, boot_id: str, fd: int | None = None, epoch: int = 1) -> None:
    """Play the server's part until the client is attached."""
    peer.welcome(boot_id)
    if fd is not None:
        peer.say(Attaching(take(peer, Declare), (0,), 1))
    peer.say(Attached(take(peer, Attach), boot_id, epoch, ARENA_BYTES, GEOMETRY), fd=fd)
    if fd is not None:
        assert peer.take() == Mapped(0, epoch)


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("kvmosaic-arena")


def test_nobody_listens_is_known_at_once_and_a_late_server_is_found(path: Path, scheduler: SchedulerSession) -> None:
    scheduler.start()
    assert scheduler.wait_settled(PATIENCE_S) is State.ABSENT
    assert scheduler.attachment is None
    assert not scheduler.wait_ready(0.01)
    with Listener(path) as listener:
        attach(listener.accept(), "boot")
        assert scheduler.wait_ready(PATIENCE_S)
        assert scheduler.attachment is not None
        assert scheduler.attachment.boot_id == "boot"
        assert scheduler.attachment.geometry == GEOMETRY
        assert scheduler.attachment.arena is None


def test_a_server_that_never_answers_is_not_waited_for(path: Path, scheduler: SchedulerSession) -> None:
    with Listener(path) as listener:
        scheduler.start()
        listener.accept()
        assert scheduler.wait_settled(PATIENCE_S) is State.ABSENT
        attach(listener.accept(), "boot")
        assert scheduler.wait_ready(PATIENCE_S)


def test_the_scheduler_asks_until_all_ranks_are_there(path: Path, scheduler: SchedulerSession) -> None:
    with Listener(path) as listener:
        scheduler.start()
        peer = listener.accept()
        hello = peer.welcome("boot")
        assert (hello.role, hello.engine) == ("scheduler", ENGINE)
        for _ in range(3):
            peer.say(Attaching(take(peer, Attach), (0,), 2))
        assert scheduler.state is State.ATTACHING
        peer.say(Attached(take(peer, Attach), "boot", 4, ARENA_BYTES, GEOMETRY))
        assert scheduler.wait_settled(PATIENCE_S) is State.READY


def test_a_worker_maps_the_arena_and_keeps_no_descriptor(path: Path, worker: Worker, arena_fd: int) -> None:
    with Listener(path) as listener:
        worker.session.start()
        peer = listener.accept()
        attach(peer, "boot", arena_fd)
        attachment = worker.session.attachment
        assert attachment is not None
        assert attachment.arena is not None, "published before the others are told"
        attachment.arena.buffer[:5] = b"bytes"
        with memoryview(os.pread(arena_fd, 5, 0)) as seen:
            assert seen == b"bytes"
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)]
        assert sum("kvmosaic-arena" in name for name in names) == 1, "the test's own"


def _exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_lost_worker_ends_its_copies_then_unmaps_then_declares_again(
    path: Path, worker: Worker, arena_fd: int
) -> None:
    with Listener(path) as listener:
        worker.session.start()
        first = listener.accept()
        attach(first, "boot", arena_fd)
        num_arenas = mapped_arenas()
        worker.may_end.clear()
        first.close()
        wait_until(lambda: worker.num_losses)
        assert worker.attachment_at_loss is None
        assert worker.session.state is State.LOST
        assert mapped_arenas() == num_arenas, "a copy may still run"
        worker.may_end.set()
        attach(listener.accept(), "boot", arena_fd, epoch=2)
        assert worker.session.attachment is not None
        assert worker.session.attachment.epoch == 2
        assert mapped_arenas() == num_arenas


def test_a_worker_gives_the_memory_back_while_no_server_is_there(path: Path, worker: Worker, arena_fd: int) -> None:
    before = mapped_arenas()
    with Listener(path) as listener:
        worker.session.start()
        attach(listener.accept(), "boot", arena_fd)
        assert mapped_arenas() == before + 1
    wait_until(lambda: worker.session.state is State.ABSENT)
    assert mapped_arenas() == before


def test_close_detaches_after_the_copies_and_the_mapping_are_gone(path: Path, worker: Worker, arena_fd: int) -> None:
    with Listener(path) as listener:
        worker.session.start()
        peer = listener.accept()
        attach(peer, "boot", arena_fd)
        num_arenas = mapped_arenas()
        worker.may_end.clear()
        closing = threading.Thread(target=worker.session.close)
        closing.start()
        wait_until(lambda: worker.num_losses)
        assert peer.is_quiet()
        worker.may_end.set()
        assert isinstance(peer.take(), Detach)
        assert mapped_arenas() == num_arenas - 1
        closing.join()
        assert worker.session.state is State.CLOSED
        wait_until(peer.is_closed)
        worker.session.close()


@pytest.mark.parametrize("declared", [False, True], ids=["at Declare", "at Attach"])
def test_a_refusal_is_kept_for_the_user_and_asked_again(
    path: Path, worker: Worker, arena_fd: int, declared: bool
) -> None:
    with Listener(path) as listener:
        worker.session.start()
        peer = listener.accept()
        peer.welcome("boot")
        if declared:
            peer.say(Attaching(take(peer, Declare), (0,), 1))
            peer.say(Refusal(take(peer, Attach), "chunk size 7"))
        else:
            peer.say(Refusal(take(peer, Declare), "chunk size 7"))
        assert worker.session.wait_settled(PATIENCE_S) is State.REFUSED
        assert worker.session.refusal == "chunk size 7"
        peer.say(Attaching(take(peer, Declare), (0,), 1))
        peer.say(Attached(take(peer, Attach), "boot", 2, ARENA_BYTES, GEOMETRY), fd=arena_fd)
        assert worker.session.wait_ready(PATIENCE_S)
        assert worker.session.refusal is None


def test_a_server_of_another_protocol_is_a_refusal(path: Path, scheduler: SchedulerSession) -> None:
    with Listener(path) as listener:
        scheduler.start()
        peer = listener.accept()
        peer.say(Failed(peer.take().id, "protocol 1, not 2"))
        peer.close()
        assert scheduler.wait_settled(PATIENCE_S) is State.REFUSED
        assert scheduler.refusal == "protocol 1, not 2"
        attach(listener.accept(), "boot")
        assert scheduler.wait_ready(PATIENCE_S)


def test_an_arena_that_is_not_what_was_announced_is_refused(path: Path, worker: Worker) -> None:
    with Listener(path) as listener:
        worker.session.start()
        peer = listener.accept()
        fd = arena.create(2 * ARENA_BYTES)
        peer.welcome("boot")
        peer.say(Attaching(take(peer, Declare), (0,), 1))
        peer.say(Attached(take(peer, Attach), "boot", 1, ARENA_BYTES, GEOMETRY), fd=fd)
        assert worker.session.wait_settled(PATIENCE_S) is State.REFUSED
        assert str(2 * ARENA_BYTES) in str(worker.session.refusal)
        os.close(fd)


def test_an_outdated_attachment_is_renewed_on_the_same_connection(path: Path, scheduler: SchedulerSession) -> None:
    with Listener(path) as listener:
        scheduler.start()
        peer = listener.accept()
        attach(peer, "boot")
        assert scheduler.wait_ready(PATIENCE_S)
        old = scheduler.attachment
        assert old is not None
        scheduler.outdate(old)
        assert scheduler.attachment is None
        peer.say(Attached(take(peer, Attach), "boot", 2, ARENA_BYTES, GEOMETRY))
        wait_until(lambda: scheduler.attachment is not None)
        scheduler.outdate(old)
        assert scheduler.attachment is not None, "an old attachment's end is no news"
        assert scheduler.attachment.epoch == 2


def test_a_restarted_server_gets_none_of_the_old_one_s_messages(path: Path, scheduler: SchedulerSession) -> None:
    with Listener(path) as listener:
        scheduler.start()
        attach(listener.accept(), "first")
        assert scheduler.wait_ready(PATIENCE_S)
    wait_until(lambda: scheduler.state is State.ABSENT)
    scheduler.post(Release(0, "old"), BootId("first"))
    with Listener(path) as listener:
        peer = listener.accept()
        attach(peer, "second")
        scheduler.post(Release(0, "new"), BootId("second"))
        assert peer.take() == Release(0, "new")


def test_a_message_reaches_the_server_over_the_next_connection(path: Path, scheduler: SchedulerSession) -> None:
    with Listener(path) as listener:
        scheduler.start()
        peer = listener.accept()
        attach(peer, "boot")
        assert scheduler.wait_ready(PATIENCE_S)
        peer.close()
        wait_until(lambda: scheduler.attachment is None)
        scheduler.post(Release(0, "r"), BootId("boot"))
        peer = listener.accept()
        peer.welcome("boot")
        assert peer.take() == Release(0, "r")


@pytest.mark.parametrize("stage", ["unstarted", "absent", "unanswered", "attaching", "ready"])
def test_close_works_at_every_stage(path: Path, stage: str) -> None:
    session = SchedulerSession(path, ENGINE)
    with Listener(path) as listener:
        if stage == "absent":
            listener.close()
        if stage != "unstarted":
            session.start()
        if stage == "absent":
            session.wait_settled(PATIENCE_S)
        if stage in ("unanswered", "attaching", "ready"):
            peer = listener.accept()
        if stage == "attaching":
            peer.welcome("boot")
        if stage == "ready":
            attach(peer, "boot")
        session.close()
        assert session.state is State.CLOSED
        assert session.attachment is None
        assert session.wait_settled(0) is State.CLOSED


def test_no_descriptor_and_no_thread_outlives_a_session(path: Path, arena_fd: int) -> None:
    def live() -> weakref.ref[Session]:
        worker = Worker(path)
        worker.session.start()
        attach(listener.accept(), "boot", arena_fd)
        worker.session.close()
        return weakref.ref(worker.session)

    with Listener(path) as listener:
        live()
        num_fds, num_threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(5):
            reference = live()
        listener._peers[-5:], gone = [], listener._peers[-5:]
        for peer in gone:
            peer.close()
        assert len(os.listdir("/proc/self/fd")) == num_fds
        assert threading.active_count() == num_threads
        gc.collect()
        assert reference() is None


def in_child(work: Callable[[], bool]) -> bool:
    """What a forked child finds."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


def test_a_forked_child_has_neither_session_nor_socket(path: Path, worker: Worker, arena_fd: int) -> None:
    with Listener(path) as listener:
        worker.session.start()
        peer = listener.accept()
        attach(peer, "boot", arena_fd)
        attachment = worker.session.attachment
        assert attachment is not None
        socket_fd = attachment.connection._socket.fileno()

        def looks_closed() -> bool:
            session = worker.session
            session.post(Release(0, "child"), BootId("boot"))
            session.close()
            return (
                session.attachment is None
                and session.state is State.CLOSED
                and not session.wait_ready(0)
                and not _exists(str(socket_fd))
                and mapped_arenas() == 0
            )

        assert in_child(looks_closed)
        assert mapped_arenas() == 1
        assert worker.session.attachment is attachment
        assert peer.is_quiet()
        assert not peer.is_closed()
        worker.session.close()
        assert isinstance(peer.take(), Detach)


def test_the_child_s_view_can_tell_a_socket_that_was_kept(path: Path) -> None:
    kept = os.open("/dev/null", os.O_RDONLY)
    assert not in_child(lambda: not _exists(str(kept)))
    os.close(kept)
