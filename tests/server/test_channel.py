import os
import socket
import struct
from collections.abc import Iterator

import pytest

from kvmosaic.errors import RemoteProtocolError
from kvmosaic.protocol.codec import encode
from kvmosaic.protocol.messages import Status
from kvmosaic.server.channel import MAX_OUTBOX_BYTES, Channel
from kvmosaic.server.engines import Session
from tests.server.kit import MortalProcess

MIB = 1 << 20


class Pair:
    """A channel and the peer's end of its socket."""

    def __init__(self) -> None:
        ours, self.peer = socket.socketpair()
        self.peer.settimeout(5)
        self.channel = Channel(ours, Session(MortalProcess()))
        self._scratch = memoryview(bytearray(MIB))

    def receive(self) -> list[object] | None:
        requests = self.channel.receive(self._scratch)
        return None if requests is None else list(requests)

    def end(self) -> None:
        self.channel.check()
        self.channel.close()
        self.peer.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.end()


def test_requests_come_out_as_they_arrive_and_none_means_the_end(pair: Pair) -> None:
    assert pair.receive() == []
    frame = encode(Status(1))
    pair.peer.sendall(frame[:3])
    assert pair.receive() == []
    pair.peer.sendall(frame[3:] + frame)
    assert pair.receive() == [Status(1), Status(1)]
    pair.peer.close()
    assert pair.receive() is None


def test_a_request_left_behind_is_found_again(pair: Pair) -> None:
    pair.peer.sendall(encode(Status(1)) + encode(Status(2)))
    assert pair.channel.unread_bytes == 2 * len(encode(Status(1)))
    requests = pair.channel.receive(memoryview(bytearray(MIB)))
    assert requests is not None
    assert next(requests) == Status(1)
    assert pair.channel.unread_bytes == 0
    assert list(pair.channel.resume()) == [Status(2)]


def test_what_the_socket_does_not_take_waits_in_order(pair: Pair) -> None:
    data = b"".join(struct.pack("<I", i) for i in range(4 * MIB))
    for start in range(0, len(data), MIB):
        pair.channel.send(data[start : start + MIB])
    assert pair.channel.congested
    received = bytearray()
    while len(received) < len(data):
        received += pair.peer.recv(MIB)
        pair.channel.flush()
        pair.channel.check()
    assert received == data
    assert not pair.channel.has_output
    assert not pair.channel.congested


def test_the_descriptor_comes_with_its_frame_and_once(pair: Pair) -> None:
    pair.channel.send(bytes(8 * MIB))
    fd = os.memfd_create("x", os.MFD_CLOEXEC)
    pair.channel.send(b"the arena" * MIB, fd)
    assert pair.channel.has_output, "the descriptor waits"
    received, fds = 0, []
    while received < 17 * MIB:
        pair.channel.flush()
        data, passed, _, _ = socket.recv_fds(pair.peer, MIB, 4)
        if passed:
            assert b"the arena" in data or received >= 8 * MIB
        received += len(data)
        fds += passed
    assert len(fds) == 1
    assert os.fstat(fds[0]).st_ino == os.fstat(fd).st_ino
    for number in (fd, *fds):
        os.close(number)


def test_a_peer_that_left_is_no_error_until_it_was_read_to_the_end(pair: Pair) -> None:
    pair.peer.sendall(encode(Status(1)))
    pair.peer.close()
    pair.channel.send(bytes(2 * MAX_OUTBOX_BYTES))
    assert not pair.channel.has_output
    assert pair.receive() == [Status(1)]
    assert pair.receive() is None


def test_noise_is_the_peers_fault(pair: Pair) -> None:
    pair.peer.sendall(b"\xff" * 8)
    with pytest.raises(RemoteProtocolError):
        pair.receive()
