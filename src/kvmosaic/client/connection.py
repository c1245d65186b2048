"""One socket to the server: requests with a deadline, one-way messages that never wait.

A late reply is recognised by its id and dropped, so a deadline never costs the connection. Threads take
turns to ask, each until its own deadline; `post` waits for nobody. Knows neither life cycles nor retries.
Locks: `_turn` before `_sending`, which is a leaf.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from kvmosaic.core.types import BootId
from kvmosaic.errors import DeadlinePassed, Refused, RemoteProtocolError, ServerLost
from kvmosaic.protocol.codec import encode, reply_decoder
from kvmosaic.protocol.messages import PROTOCOL, Attached, Failed, Hello, Reply, Request, Role, Welcome

LateReply = Callable[[Reply], None]
E = TypeVar("E", bound=Exception)

_READ_BYTES = 256 << 10
_DESCRIPTOR_BYTES = 4
_UCRED = struct.Struct("3i")  # pid, uid, gid of the peer
# Requests are taken back, so only one-way messages pile up here, and each of them ends something that the
# server has granted before. So many of them mean a broken server.
_OUTBOX_FRAMES = 1 << 16


class Connection:
    """Wraps a connected socket. Every method but close() raises ServerLost once the connection is gone."""

    @classmethod
    def connect(cls, path: Path) -> Connection:
        """ServerLost when nobody listens."""
        sock = None
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # A server that no longer accepts would let a blocking connect() wait for ever.
            sock.setblocking(False)
            sock.connect(str(path))
        except OSError as error:
            if sock is not None:
                sock.close()
            raise ServerLost(f"no server at {path}: {error.strerror or error}") from error
        return cls(sock)

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self.answered_id = 0
        """The last request that was answered."""
        self._lost = ""
        self._turn = threading.Lock()
        self._decoder = reply_decoder()
        self._chunk = bytearray(_READ_BYTES)
        self._fds: deque[int] = deque()
        self._late: dict[int, LateReply | None] = {}
        self._sending = threading.Lock()
        self._last_id = 0
        self._outbox: deque[memoryview] = deque()

    def hello(self, role: Role, engine: str, timeout_s: float) -> BootId:
        """Introduce this side. Raises Refused when one side does not trust the other, and DeadlinePassed."""
        self._check_owner()
        match self.request(Hello(0, PROTOCOL, role, engine), timeout_s):
            case Welcome(boot_id=boot_id):
                return BootId(boot_id)
            case Failed(reason=reason):
                raise Refused(reason)
            case reply:
                raise self._give_up(RemoteProtocolError(f"Hello was answered with {type(reply).__name__}"))

    def _check_owner(self) -> None:
        """Whoever can make the path of the socket first could otherwise feed us bytes of his own."""
        _, uid, _ = _UCRED.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid not in (0, os.geteuid()):
            raise Refused(f"the server runs as uid {uid} and this process as {os.geteuid()}; run both as one user")

    def request(self, message: Request, timeout_s: float, on_late: LateReply | None = None) -> Reply:
        """Send a request (its id is given here) and wait for its reply, `Failed` included.

        Raises DeadlinePassed; a reply that comes later goes to `on_late`, on whichever thread reads it. That may
        post, but not ask.
        """
        reply, fd = self._ask(message, timeout_s, on_late)
        _close_fd(fd)
        return reply

    def request_with_fd(self, message: Request, timeout_s: float) -> tuple[Reply, int | None]:
        """The same for a reply that may carry a descriptor, which then belongs to the caller."""
        return self._ask(message, timeout_s, None)

    def post(self, message: Request) -> int:
        """Send a one-way message; what the socket does not take now leaves with a later call.

        The server, which keeps the order, has seen it when `answered_id` is greater than the returned number.
        """
        with self._sending:
            self._send(memoryview(encode(message)))
            return self._last_id

    def tend(self) -> None:
        """Send what waits and take in late replies, without waiting. For a thread that looks in at times."""
        self._flush()
        if self._late and self._turn.acquire(blocking=False):
            try:
                for reply, fd in self._read():
                    self._take_late(reply, fd)
            finally:
                self._turn.release()

    def wait_closed(self, timeout_s: float, wake_fd: int) -> bool:
        """Wait for the end of the connection, reading nothing. False after the time-out or a wake-up."""
        if not self._lost:
            poller = select.poll()
            poller.register(self._socket, select.POLLRDHUP)
            poller.register(wake_fd, select.POLLIN)
            ready = poller.poll(_milliseconds(timeout_s))
            if all(fd == wake_fd for fd, _ in ready):
                return False
        return True

    def shutdown(self) -> None:
        """End the connection under everybody who uses it; close() must follow."""
        self._give_up(ServerLost("the connection was closed"))

    def close(self) -> None:
        """Give the descriptor back; a second call does nothing. Not while another thread is in wait_closed()."""
        self.shutdown()
        # That has woken whoever asks; the number of the descriptor may be reused once they are out.
        with self._turn, self._sending:
            self._socket.close()
            while self._fds:
                os.close(self._fds.popleft())

    def close_in_child(self) -> None:
        """After a fork: drop the child's copy without touching the parent's connection or any lock."""
        self._lost = "a forked child does not use its parent's connection"
        _close_fd(self._socket.detach())

    def check(self) -> None:
        """Nothing empty waits, and only what was asked can be late."""
        with self._sending:
            assert all(len(frame) for frame in self._outbox)
            assert all(late <= self._last_id for late in self._late)
        if not self._lost:
            self._decoder.check()

    def _ask(self, message: Request, timeout_s: float, on_late: LateReply | None) -> tuple[Reply, int | None]:
        deadline = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=max(0.0, timeout_s)):
            raise DeadlinePassed(f"another request was not answered within {timeout_s:.3f} s")
        try:
            number, frame = self._send_request(message)
            while (answer := self._find_answer(number)) is None:
                if not self._wait_readable(deadline):
                    if not self._take_back(frame):
                        self._late[number] = on_late
                    raise DeadlinePassed(f"{type(message).__name__} got no answer within {timeout_s:.3f} s")
            return answer
        finally:
            self._turn.release()

    def _find_answer(self, number: int) -> tuple[Reply, int | None] | None:
        """Read what is here; all but the answer is late."""
        answer = None
        for reply, fd in self._read():
            if answer is None and (reply.id == number or _is_dismissal(reply)):
                answer = reply, fd
            else:
                self._take_late(reply, fd)
        return answer

    def _send_request(self, message: Request) -> tuple[int, memoryview]:
        with self._sending:
            self._last_id += 1
            number = self._last_id
            frame = memoryview(encode(msgspec.structs.replace(message, id=number)))
            self._send(frame)
        return number, frame

    def _send(self, frame: memoryview) -> None:
        """The caller holds `_sending`."""
        self._outbox.append(frame)
        self._push()
        if len(self._outbox) > _OUTBOX_FRAMES:
            raise self._give_up(ServerLost("the server has stopped reading"))

    def _flush(self) -> None:
        with self._sending:
            self._push()

    def _push(self) -> None:
        """Give the socket what it takes now. The caller holds `_sending`."""
        with self._os_errors():
            while self._outbox:
                frame = self._outbox[0]
                try:
                    num_sent = self._socket.send(frame, socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    return
                if num_sent < len(frame):
                    self._outbox[0] = frame[num_sent:]
                else:
                    self._outbox.popleft()

    def _take_back(self, frame: memoryview) -> bool:
        """Unsend a request of which no byte has left: dead requests must not pile up for a stopped server."""
        with self._sending:
            for position, waiting in enumerate(self._outbox):
                if waiting is frame:
                    del self._outbox[position]
                    return True
        return False

    def _wait_readable(self, deadline: float) -> bool:
        """Sends on while it waits. False once the deadline has passed."""
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return False
        poller = select.poll()
        with self._os_errors():
            poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        poller.poll(_milliseconds(remaining_s))
        self._flush()
        return True

    def _read(self) -> list[tuple[Reply, int | None]]:
        """All replies that are here, each with its descriptor. The caller has the turn."""
        replies: list[Reply] = []
        num_bytes: int | None = _READ_BYTES
        while num_bytes == _READ_BYTES and (num_bytes := self._receive()) is not None:
            if num_bytes == 0 and not replies:
                raise self._give_up(ServerLost("the server closed the connection"))
            replies += self._decode(num_bytes)
        self.answered_id = max([self.answered_id, *(reply.id for reply in replies)])
        return [(reply, self._fd_of(reply)) for reply in replies]

    def _receive(self) -> int | None:
        """Fill the chunk; 0 at the end of the stream, None when nothing is there."""
        space = socket.CMSG_SPACE(_DESCRIPTOR_BYTES)
        with self._os_errors():
            try:
                num_bytes, ancillary, _, _ = self._socket.recvmsg_into([self._chunk], space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return None
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.append(int.from_bytes(data[:_DESCRIPTOR_BYTES], sys.byteorder))
        return num_bytes

    def _decode(self, num_bytes: int) -> list[Reply]:
        try:
            return list(self._decoder.feed(memoryview(self._chunk)[:num_bytes]))
        except RemoteProtocolError as error:
            raise self._give_up(error) from error

    def _fd_of(self, reply: Reply) -> int | None:
        """A descriptor arrives no later than the last byte of its frame, and only an Attached has one."""
        return self._fds.popleft() if isinstance(reply, Attached) and self._fds else None

    def _take_late(self, reply: Reply, fd: int | None) -> None:
        _close_fd(fd)
        on_late = self._late.pop(reply.id, None)
        if on_late is not None:
            on_late(reply)

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        """The one place where the socket's errors become ours."""
        if self._lost:
            raise ServerLost(self._lost)
        try:
            yield
        except BlockingIOError:
            raise
        except OSError as error:
            raise self._give_up(ServerLost(f"the connection broke: {error.strerror or error}")) from error

    def _give_up(self, error: E) -> E:
        """Never use the connection again, and wake every thread that waits on it."""
        if not self._lost:
            self._lost = str(error)
            with suppress(OSError):  # the peer may have reset it already
                self._socket.shutdown(socket.SHUT_RDWR)
        return error


def _is_dismissal(reply: Reply) -> bool:
    """The server closes the connection, and this says why: it answers whatever was asked."""
    return isinstance(reply, Failed) and reply.id == 0


def _close_fd(fd: int | None) -> None:
    if fd is not None and fd >= 0:
        os.close(fd)


def _milliseconds(timeout_s: float) -> int:
    return max(0, math.ceil(timeout_s * 1000))
