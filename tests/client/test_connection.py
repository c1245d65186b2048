import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvmosaic.client.connection import Connection
from kvmosaic.errors import DeadlinePassed, Refused, RemoteProtocolError, ServerLost
from kvmosaic.protocol.codec import encode
from kvmosaic.protocol.messages import (
    Attach,
    Attached,
    Clear,
    Cleared,
    Commit,
    Failed,
    Hello,
    Lookup,
    Message,
    Miss,
    Release,
    Reserve,
    Reserved,
    Status,
    StatusReport,
    Welcome,
)
from tests.client.peers import GEOMETRY, Peer, wait_until

SOON_S = 0.02
LATE_S = 10.0


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Peer]]:
    ours, theirs = socket.socketpair()
    connection, peer = Connection(ours), Peer(theirs)
    yield connection, peer
    connection.check()
    connection.close()
    peer.close()


def answering(peer: Peer, *replies: Callable[[int], Message]) -> threading.Thread:
    """Answers each request with the next reply, made for its id."""

    def run() -> None:
        for reply in replies:
            request = peer.take()
            peer.say(reply(request.id))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_reply_reaches_its_request(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    thread = answering(peer, lambda number: Cleared(number, 7), lambda number: Cleared(number, 8))
    assert connection.request(Clear(0), LATE_S) == Cleared(1, 7)
    assert connection.request(Clear(0), LATE_S) == Cleared(2, 8)
    thread.join()


def test_a_reply_may_arrive_byte_by_byte(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair

    def run() -> None:
        for byte in encode(Cleared(peer.take().id, 7)):
            peer.socket.send(bytes([byte]))

    thread = threading.Thread(target=run)
    thread.start()
    assert connection.request(Clear(0), LATE_S) == Cleared(1, 7)
    thread.join()


def test_a_large_reply_is_read_whole(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    extents = bytes(3 << 20)
    thread = answering(peer, lambda number: Reserved(number, 1, b"", extents, b""))
    reply = connection.request(Reserve(0, 1, ()), LATE_S)
    assert isinstance(reply, Reserved)
    assert reply.extents == extents
    thread.join()


def test_hello_gives_the_boot_id(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    thread = answering(peer, lambda number: Welcome(number, "boot"))
    assert connection.hello("operator", "", LATE_S) == "boot"
    thread.join()


@pytest.mark.parametrize("number", [1, 0], ids=["answered", "dismissed"])
def test_hello_is_refused_with_the_reason_of_the_server(pair: tuple[Connection, Peer], number: int) -> None:
    connection, peer = pair
    thread = answering(peer, lambda _: Failed(number, "protocol 1 is not 2"))
    with pytest.raises(Refused, match="protocol 1 is not 2"):
        connection.hello("operator", "", LATE_S)
    thread.join()


def test_a_passed_deadline_leaves_the_connection_usable(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    began = time.monotonic()
    with pytest.raises(DeadlinePassed):
        connection.request(Status(0), SOON_S)
    assert SOON_S <= time.monotonic() - began < SOON_S + 0.1
    late = peer.take()
    peer.say(StatusReport(late.id, {"late": True}))
    thread = answering(peer, lambda number: StatusReport(number, {"late": False}))
    assert connection.request(Status(0), LATE_S) == StatusReport(2, {"late": False})
    thread.join()


def test_a_late_reply_goes_to_its_own_handler(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    late: list[object] = []
    with pytest.raises(DeadlinePassed):
        connection.request(Reserve(0, 1, ()), SOON_S, late.append)
    reserved = Reserved(peer.take().id, 5, b"\0", b"", b"")
    connection.tend()
    assert late == []
    peer.say(reserved)
    connection.tend()
    assert late == [reserved]
    peer.say(reserved)
    connection.tend()
    assert late == [reserved], "a second reply of that id is dropped"


def test_post_never_waits_and_keeps_the_order(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    num_posts = 20_000
    began = time.monotonic()
    for number in range(num_posts):
        connection.post(Commit(0, number, bytes(64)))
    assert time.monotonic() - began < 5
    for number in range(num_posts):
        if number % 100 == 0:
            connection.tend()
        message = peer.take()
        assert isinstance(message, Commit)
        assert message.reservation == number


def test_a_server_that_never_reads_is_given_up(pair: tuple[Connection, Peer]) -> None:
    connection, _ = pair

    def post_for_ever() -> None:
        while True:
            connection.post(Release(0, "request"))

    with pytest.raises(ServerLost, match="stopped reading"):
        post_for_ever()


def test_a_request_of_which_nothing_has_left_is_taken_back(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    digests = bytes(8 << 20)
    for _ in range(5):
        with pytest.raises(DeadlinePassed):
            connection.request(Lookup(0, 1, "r", 0, 32, digests), SOON_S)
    connection.post(Release(0, "r"))
    taken: list[Message] = []
    thread = threading.Thread(target=lambda: taken.extend(peer.take() for _ in range(2)))
    thread.start()

    def both_have_come() -> bool:
        connection.tend()
        return not thread.is_alive()

    wait_until(both_have_come)
    assert [type(message) for message in taken] == [Lookup, Release], "the lookup that had begun to leave, and no other"


def test_an_answer_confirms_what_was_posted_before_its_request(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    before = connection.post(Release(0, "before"))
    with pytest.raises(DeadlinePassed):
        connection.request(Status(0), 0.0)
    after = connection.post(Release(0, "after"))
    assert connection.answered_id <= before
    assert peer.take() == Release(0, "before")
    peer.say(StatusReport(peer.take().id, {}))
    connection.tend()
    assert before < connection.answered_id <= after


def test_a_descriptor_comes_with_its_reply(pair: tuple[Connection, Peer], tmp_path: Path) -> None:
    connection, peer = pair
    sent = os.open(tmp_path, os.O_RDONLY)
    thread = threading.Thread(target=lambda: peer.say(Attached(peer.take().id, "boot", 1, 4096, GEOMETRY), fd=sent))
    thread.start()
    reply, fd = connection.request_with_fd(Attach(0), LATE_S)
    thread.join()
    assert isinstance(reply, Attached)
    assert fd is not None
    assert os.path.samestat(os.fstat(fd), os.fstat(sent))
    assert not os.get_inheritable(fd)
    os.close(fd)
    os.close(sent)


def test_no_descriptor_stays_open_that_nobody_waits_for(pair: tuple[Connection, Peer], tmp_path: Path) -> None:
    connection, peer = pair
    with pytest.raises(DeadlinePassed):
        connection.request_with_fd(Attach(0), SOON_S)
    sent = os.open(tmp_path, os.O_RDONLY)
    num_fds = open_fds()
    peer.say(Attached(peer.take().id, "boot", 1, 4096, GEOMETRY), fd=sent)
    connection.tend()
    assert open_fds() == num_fds
    os.close(sent)


def test_one_descriptor_that_is_not_closed_would_be_seen(tmp_path: Path) -> None:
    num_fds = open_fds()
    fd = os.open(tmp_path, os.O_RDONLY)
    assert open_fds() == num_fds + 1
    os.close(fd)


@pytest.mark.parametrize("wait_s", [0.0, LATE_S], ids=["before", "while waiting"])
def test_end_of_stream_is_a_lost_server(pair: tuple[Connection, Peer], wait_s: float) -> None:
    connection, peer = pair
    if wait_s:
        thread = threading.Thread(target=lambda: (peer.take(), peer.close()))
        thread.start()
    else:
        peer.close()
    with pytest.raises(ServerLost):
        connection.request(Clear(0), LATE_S)
    with pytest.raises(ServerLost):
        connection.post(Release(0, "r"))
    if wait_s:
        thread.join()


def test_garbage_is_the_fault_of_the_server_and_ends_the_connection(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    peer.socket.sendall(b"\xff\xff\xff\xff garbage")
    with pytest.raises(RemoteProtocolError):
        connection.request(Clear(0), LATE_S)
    with pytest.raises(ServerLost):
        connection.request(Clear(0), LATE_S)
    assert peer.is_closed()


def test_a_message_for_the_other_side_is_not_accepted(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    peer.say(Hello(1, 1, "worker", ""))
    with pytest.raises(RemoteProtocolError):
        connection.request(Clear(0), LATE_S)


def test_a_second_thread_waits_for_its_turn_only_until_its_deadline(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    first: list[object] = []
    thread = threading.Thread(target=lambda: first.append(connection.request(Status(0), LATE_S)))
    thread.start()
    status = peer.take()
    with pytest.raises(DeadlinePassed):
        connection.request(Clear(0), SOON_S)
    connection.post(Release(0, "r"))
    assert peer.take() == Release(0, "r"), "a one-way message passes the request that waits"
    peer.say(StatusReport(status.id, {}))
    thread.join()
    assert first == [StatusReport(status.id, {})]


def test_close_wakes_a_thread_that_asks(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            connection.request(Status(0), LATE_S)
        except ServerLost as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    peer.take()
    connection.close()
    thread.join(LATE_S)
    assert len(errors) == 1
    connection.close()


def test_waiting_for_the_end_reads_nothing_and_can_be_woken(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    wake_fd = os.eventfd(0)
    assert not connection.wait_closed(0.0, wake_fd)
    peer.say(Miss(99, 0))
    os.eventfd_write(wake_fd, 1)
    assert not connection.wait_closed(LATE_S, wake_fd)
    peer.close()
    assert connection.wait_closed(LATE_S, wake_fd)
    os.close(wake_fd)


def test_nobody_listens(tmp_path: Path) -> None:
    num_fds = open_fds()
    for path in (tmp_path / "none", tmp_path / ("x" * 200), tmp_path):
        with pytest.raises(ServerLost):
            Connection.connect(path)
    assert open_fds() == num_fds


def test_no_descriptor_left_is_a_lost_server(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(ServerLost):
            Connection.connect(tmp_path / "none")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_full_backlog_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        connections = []

        def connect_for_ever() -> None:
            while True:
                connections.append(Connection.connect(path))

        began = time.monotonic()
        with pytest.raises(ServerLost):
            connect_for_ever()
        assert time.monotonic() - began < 1
        for connection in connections:
            connection.close()


def test_a_forked_child_drops_its_copy_and_the_parent_goes_on(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    pid = os.fork()
    if pid == 0:
        connection.close_in_child()
        try:
            connection.post(Release(0, "child"))
        except ServerLost:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    connection.post(Release(0, "parent"))
    assert peer.take() == Release(0, "parent")
