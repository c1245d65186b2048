import socket
from collections.abc import Iterator

import pytest

from kvmosaic.client.connection import Connection
from kvmosaic.client.mail import Mail
from kvmosaic.core.types import BootId
from kvmosaic.protocol.messages import Commit, Release, Status, StatusReport
from tests.client.peers import Peer

OLD, NEW = BootId("old"), BootId("new")
LATE_S = 10.0


class Wire:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.connection, self.peer = Connection(ours), Peer(theirs)

    def close(self) -> None:
        self.connection.close()
        self.peer.close()


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    first, second = Wire(), Wire()
    yield first, second
    first.close()
    second.close()


@pytest.fixture
def mail() -> Iterator[Mail]:
    mail = Mail()
    yield mail
    mail.check()


def test_messages_leave_at_once_while_the_server_is_there(mail: Mail, wires: tuple[Wire, Wire]) -> None:
    wire, _ = wires
    mail.open(wire.connection, OLD)
    mail.post(Release(0, "a"), OLD)
    assert wire.peer.take() == Release(0, "a")


def test_messages_wait_in_order_for_their_server(mail: Mail, wires: tuple[Wire, Wire]) -> None:
    wire, _ = wires
    mail.post(Release(0, "a"), OLD)
    mail.post(Commit(0, 1, b""), OLD)
    mail.open(wire.connection, OLD)
    assert wire.peer.take() == Release(0, "a")
    assert wire.peer.take() == Commit(0, 1, b"")


def test_no_other_life_of_the_server_gets_them(mail: Mail, wires: tuple[Wire, Wire]) -> None:
    wire, _ = wires
    mail.post(Commit(0, 1, b"\1"), OLD)
    mail.open(wire.connection, NEW)
    mail.post(Commit(0, 2, b"\1"), OLD)
    mail.post(Commit(0, 3, b"\1"), NEW)
    assert wire.peer.take() == Commit(0, 3, b"\1")
    assert wire.peer.is_quiet()


def test_what_a_broken_connection_may_have_lost_goes_out_again(mail: Mail, wires: tuple[Wire, Wire]) -> None:
    broken, whole = wires
    mail.open(broken.connection, OLD)
    mail.post(Release(0, "seen"), OLD)
    assert broken.peer.take() == Release(0, "seen")
    broken.peer.say(StatusReport(1, {}))
    broken.connection.request(Status(0), LATE_S)
    mail.post(Release(0, "lost"), OLD)
    broken.peer.close()
    mail.post(Release(0, "refused by the socket"), OLD)
    mail.close()
    mail.post(Release(0, "between"), OLD)
    mail.open(whole.connection, OLD)
    for request in ("lost", "refused by the socket", "between"):
        assert whole.peer.take() == Release(0, request)
    assert whole.peer.is_quiet()
