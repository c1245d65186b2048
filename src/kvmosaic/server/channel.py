"""One connected socket: bytes in to requests, replies out to bytes. Never blocks, and holds a bounded amount.

A peer that does not read its replies is not read from either: `congested` tells the loop so. Knows no message's
meaning. Used by the loop's thread only.
"""

from __future__ import annotations

import fcntl
import socket
import sys
import termios
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvmosaic.protocol.codec import request_decoder
from kvmosaic.protocol.messages import Request
from kvmosaic.server.engines import Session

MAX_OUTBOX_BYTES = 1 << 20
"""With more than this unsent, no further request of the session is served."""

_SOCKET_BUFFER_BYTES = 4 << 20
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # not named by Python


@dataclass(slots=True)
class _Frame:
    """What is left of one frame; the descriptor goes with its first byte."""

    data: memoryview
    fd: int | None


class Channel:
    """A session's socket. Only receive() can find that it is lost: what the peer said before it left still counts,
    so a reply that nobody takes is no reason to stop reading."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.sock = sock
        self.session = session
        self.closing = False
        """No further request is served; the loop closes it as soon as the outbox is empty."""
        self._decoder = request_decoder()
        self._outbox: deque[_Frame] = deque()
        self._outbox_bytes = 0
        self._muted = False
        sock.setblocking(False)
        _enlarge_buffers(sock)

    @property
    def congested(self) -> bool:
        """The peer must read before it is served again."""
        return self._outbox_bytes > MAX_OUTBOX_BYTES

    @property
    def has_output(self) -> bool:
        """Something waits for room in the socket."""
        return bool(self._outbox)

    def receive(self, scratch: memoryview) -> Iterator[Request] | None:
        """The requests completed by what has arrived; None at the end of the stream. May raise OSError.

        What is not taken out of the iterator stays for resume().
        """
        try:
            num_bytes = self.sock.recv_into(scratch)
        except BlockingIOError:
            return iter(())
        return self._decoder.feed(scratch[:num_bytes]) if num_bytes else None

    def resume(self) -> Iterator[Request]:
        """The complete requests that were left in the last iterator."""
        return self._decoder.feed(b"")

    @property
    def unread_bytes(self) -> int:
        """How much has arrived and was not received yet."""
        size = fcntl.ioctl(self.sock, termios.FIONREAD, bytes(4))
        return int.from_bytes(size, sys.byteorder)

    def mute(self) -> None:
        """Nobody will read any more: drop what is sent from now on."""
        self._muted = True
        self._outbox.clear()
        self._outbox_bytes = 0

    def send(self, frame: bytes, fd: int | None = None) -> None:
        """Queue a frame, and a descriptor with it, and send what the socket takes."""
        if self._muted:
            return
        self._outbox.append(_Frame(memoryview(frame), fd))
        self._outbox_bytes += len(frame)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        try:
            while self._outbox:
                self._send_some(self._outbox[0])
        except BlockingIOError:
            return
        except OSError:
            self.mute()

    def close(self) -> None:
        """The end. A second call does nothing."""
        self.mute()
        self.sock.close()

    def check(self) -> None:
        """The outbox is counted right, and the decoder holds at most a frame."""
        assert self._outbox_bytes == sum(frame.data.nbytes for frame in self._outbox)

    def _send_some(self, frame: _Frame) -> None:
        if frame.fd is None:
            num_bytes = self.sock.send(frame.data)
        else:
            num_bytes = socket.send_fds(self.sock, [frame.data], [frame.fd])
            frame.fd = None
        frame.data = frame.data[num_bytes:]
        self._outbox_bytes -= num_bytes
        if not frame.data:
            self._outbox.popleft()


def _enlarge_buffers(sock: socket.socket) -> None:
    """One lookup of a long prompt should fit, so that neither side waits for the other in the middle of a frame."""
    for forced, plain in ((_SO_SNDBUFFORCE, socket.SO_SNDBUF), (_SO_RCVBUFFORCE, socket.SO_RCVBUF)):
        try:
            sock.setsockopt(socket.SOL_SOCKET, forced, _SOCKET_BUFFER_BYTES)
        except PermissionError:  # without CAP_NET_ADMIN the system's maximum binds
            sock.setsockopt(socket.SOL_SOCKET, plain, _SOCKET_BUFFER_BYTES)
