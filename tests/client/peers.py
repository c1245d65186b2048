"""The other end of a client's socket, played by the test: it reads the real messages and says what the test wants."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from kvmosaic.core.types import Kind
from kvmosaic.layout.groups import Declaration, Geometry, Group, Shard
from kvmosaic.protocol.codec import encode, request_decoder
from kvmosaic.protocol.messages import Hello, Message, Request, Welcome

PATIENCE_S = 10.0

FULL = Group(Kind.FULL, block_tokens=16)
DECLARATION = Declaration(0, 1, "model", (FULL,), (Shard(4096, 0),), {}, "pages", 8192, 16)
GEOMETRY = Geometry("model", bytes(16), 256, (FULL,), (), 1, 16)


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Poll a condition that another thread or process brings about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {PATIENCE_S} s"
        time.sleep(0.002)


class Peer:
    """One accepted connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE_S)
        self.socket = sock
        self._decoder = request_decoder()
        self._read: list[Request] = []

    def take(self) -> Request:
        """The next message; fails when none comes."""
        while not self._read:
            data = self.socket.recv(1 << 20)
            assert data, "the client closed the connection"
            self._read.extend(self._decoder.feed(data))
        return self._read.pop(0)

    def is_quiet(self) -> bool:
        """Nothing has arrived that was not taken."""
        return not self._read and not select.select([self.socket], [], [], 0)[0]

    def say(self, *messages: Message, fd: int | None = None) -> None:
        """Send messages in one piece, and a descriptor with them."""
        data = b"".join(map(encode, messages))
        if fd is None:
            self.socket.sendall(data)
        else:
            assert socket.send_fds(self.socket, [data], [fd]) == len(data)

    def welcome(self, boot_id: str) -> Hello:
        """Take a Hello and answer it."""
        hello = self.take()
        assert isinstance(hello, Hello)
        self.say(Welcome(hello.id, boot_id))
        return hello

    def is_closed(self) -> bool:
        """The client has closed its end."""
        poller = select.poll()
        poller.register(self.socket, select.POLLRDHUP)
        return bool(poller.poll(0))

    def close(self) -> None:
        self.socket.close()


class Listener:
    """A server's socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._socket.settimeout(PATIENCE_S)
        self._peers: list[Peer] = []

    def accept(self) -> Peer:
        peer = Peer(self._socket.accept()[0])
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        """As if the server was killed."""
        for peer in self._peers:
            peer.close()
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
