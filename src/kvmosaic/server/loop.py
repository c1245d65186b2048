"""The server's only loop: one thread, one poll over sockets, pidfds and a waker. It owns the service and all sessions.

    socket readable -> Channel -> requests -> Service -> replies -> Channel -> socket
    pidfd readable  -> proof of death: read what the process still said, close its sessions, tell the service
    other threads   -> post(call): the call runs here between two polls

It never blocks on a peer and never ends a session because of time. Everything runs on the thread of run(), except
post() and stop().
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeVar

from kvmosaic.errors import RemoteProtocolError
from kvmosaic.protocol.codec import encode
from kvmosaic.protocol.messages import Attached, Failed, Request
from kvmosaic.server.channel import Channel
from kvmosaic.server.engines import Session
from kvmosaic.server.peers import Process, Processes
from kvmosaic.server.service import Clock, Service

T = TypeVar("T")

_TICK_S: Final = 1.0
_CHECK_EVERY_S: Final = 10.0
_SCRATCH_BYTES: Final = 1 << 20
_REQUESTS_A_TURN: Final = 64
"""After so many requests of one session the others have their turn."""

_INTERNAL_ERROR: Final = "internal error; the server's log has the details"

_log = logging.getLogger("kvmosaic.server")


class Loop:
    """Serves a listening socket until stop()."""

    def __init__(
        self,
        listener: socket.socket,
        arena_fd: int,
        service: Service,
        clock: Clock,
        exit_when_idle_s: float | None = None,
    ) -> None:
        self._listener = listener
        self._arena_fd = arena_fd
        self._service = service
        self._clock = clock
        self._exit_when_idle_s = exit_when_idle_s
        self._idle_since = self._checked_at = clock()
        self._selector = selectors.DefaultSelector()
        self._channels: set[Channel] = set()
        self._processes = Processes()
        self._backlog: set[Channel] = set()
        """Sessions whose turn ended before their received requests did; nothing more is read from them."""
        self._watched: set[Process] = set()
        self._calls: deque[Callable[[], None]] = deque()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def run(self) -> None:
        """Serve until stop(), then close every session and the listener."""
        self._listener.setblocking(False)
        self._selector.register(self._waker, selectors.EVENT_READ, self._run_calls)
        self._accept_again()
        try:
            while not self._stopping:
                events = self._selector.select(0 if self._backlog else _TICK_S)
                for key, mask in events:
                    key.data(mask)
                self._serve_backlog()
                self._tick(idle=not events)
        finally:
            self._end()

    def post(self, call: Callable[[], None]) -> None:
        """Run a call on the loop's thread soon. From any thread; dropped when the loop has ended."""
        self._calls.append(call)
        self._wake()

    def stop(self) -> None:
        """End run() soon. From any thread and from signal handlers."""
        self._stopping = True
        self._wake()

    def close(self) -> None:
        """After run(), when no other thread posts any more."""
        os.close(self._waker)

    def check(self) -> None:
        """Every layer is consistent."""
        for channel in self._channels:
            channel.check()
        self._processes.check()
        self._service.check()

    # Events.

    def _run_calls(self, _mask: int) -> None:
        os.eventfd_read(self._waker)
        while self._calls:
            _attempt("a call of another thread", self._calls.popleft())

    def _accept(self, _mask: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Out of descriptors: the listener would stay readable, so look again at the next tick.
            _log.error("cannot accept a connection: %s", error)
            self._selector.unregister(self._listener)
            return
        process = self._processes.meet(sock)
        channel = Channel(sock, Session(process))
        self._channels.add(channel)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._on_socket, channel))
        if process.pidfd is not None and process not in self._watched:
            self._watched.add(process)
            self._selector.register(process.pidfd, selectors.EVENT_READ, partial(self._on_death, process))
        if process.uid not in (os.geteuid(), 0):
            self._dismiss(channel, f"uid {process.uid} may not use the server of uid {os.geteuid()}")

    def _on_socket(self, channel: Channel, mask: int) -> None:
        if channel not in self._channels:
            return  # closed by an earlier event of the same poll
        try:
            if mask & selectors.EVENT_WRITE:
                self._write(channel)
            if mask & selectors.EVENT_READ and not (channel.closing or channel.congested or channel in self._backlog):
                self._read(channel)
        except OSError as error:
            _log.info("lost a session of %s: %s", channel.session.process, error)
            self._lose(channel)

    def _on_death(self, process: Process, _mask: int) -> None:
        for channel in [c for c in self._channels if c.session.process is process]:
            self._read_last_words(channel)
            self._lose(channel)
        self._service.died(process)
        self._forget(process)

    # One session.

    def _read(self, channel: Channel) -> None:
        requests = channel.receive(self._scratch)
        if requests is None:
            self._lose(channel)
        else:
            self._serve(channel, requests)

    def _write(self, channel: Channel) -> None:
        channel.flush()
        if channel.has_output or channel.closing:
            self._watch(channel)
        else:
            self._serve(channel, channel.resume())

    def _read_last_words(self, channel: Channel) -> None:
        """What a process said before it died counts: it may be the commit of what it stored.

        A forked child may still hold the socket and write, so only what has arrived by now is read.
        """
        channel.mute()
        unread_bytes = channel.unread_bytes
        self._serve(channel, channel.resume(), None)
        with contextlib.suppress(OSError):
            while unread_bytes > 0 and not channel.closing:
                self._serve(channel, channel.receive(self._scratch) or iter(()), None)
                unread_bytes -= _SCRATCH_BYTES

    def _serve_backlog(self) -> None:
        waiting, self._backlog = self._backlog, set()
        for channel in waiting:
            self._serve(channel, channel.resume())

    def _serve(self, channel: Channel, requests: Iterator[Request], limit: int | None = _REQUESTS_A_TURN) -> None:
        """Answer requests until there is none left, the peer must read first, or its turn is over."""
        try:
            for number, request in enumerate(requests, 1):
                self._answer(channel, request)
                if channel.congested or channel.closing:
                    break
                if number == limit:
                    self._backlog.add(channel)
                    break
        except RemoteProtocolError as error:
            self._dismiss(channel, str(error))
        self._watch(channel)

    def _answer(self, channel: Channel, request: Request) -> None:
        call = partial(self._frame, channel.session, request)
        try:
            answer = _attempt(f"{type(request).__name__} of {channel.session.process}", call)
        except RemoteProtocolError as error:
            self._dismiss(channel, str(error), request.id)
            return
        frame, fd = answer or (encode(Failed(request.id, _INTERNAL_ERROR)), None)
        if frame and request.id:
            channel.send(frame, fd)

    def _frame(self, session: Session, request: Request) -> tuple[bytes, int | None]:
        """The reply's frame, empty without a reply, and the descriptor that goes with it."""
        reply = self._service.handle(session, request)
        if reply is None:
            return b"", None
        carries_arena = isinstance(reply, Attached) and session.role == "worker"
        return encode(reply), self._arena_fd if carries_arena else None

    def _dismiss(self, channel: Channel, reason: str, request_id: int = 0) -> None:
        """Close a session, with a reason for its peer."""
        _log.warning("closing a session of %s: %s", channel.session.process, reason)
        channel.closing = True
        channel.send(encode(Failed(request_id, reason)))
        self._watch(channel)

    def _watch(self, channel: Channel) -> None:
        """Poll for what this session can do next; a dismissed one that has said its reason is closed."""
        if channel not in self._channels:
            return
        if channel.closing and not channel.has_output:
            self._lose(channel)
            return
        reads = not (channel.closing or channel.congested)
        mask = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if channel.has_output else 0)
        key = self._selector.get_key(channel.sock)
        if key.events != mask:
            self._selector.modify(channel.sock, mask, key.data)

    def _lose(self, channel: Channel) -> None:
        """The session is over; its process may live on and keep its rights."""
        if channel not in self._channels:
            return
        self._channels.remove(channel)
        self._backlog.discard(channel)
        self._selector.unregister(channel.sock)
        channel.close()
        self._service.lost(channel.session)
        process = channel.session.process
        if not any(c.session.process is process for c in self._channels) and not self._service.needs(process):
            self._forget(process)

    def _forget(self, process: Process) -> None:
        if process in self._watched:
            assert process.pidfd is not None
            self._selector.unregister(process.pidfd)
            self._watched.remove(process)
        self._processes.forget(process)

    # Time and the end.

    def _tick(self, idle: bool) -> None:
        now = self._clock()
        if self._listener.fileno() not in self._selector.get_map():
            self._accept_again()
        if len(self._service.engines):
            self._idle_since = now
        elif self._exit_when_idle_s is not None and now - self._idle_since >= self._exit_when_idle_s:
            _log.info("no engine for %g s: ending", self._exit_when_idle_s)
            self._stopping = True
        if idle and _log.isEnabledFor(logging.DEBUG) and now - self._checked_at >= _CHECK_EVERY_S:
            self._checked_at = now
            self.check()

    def _accept_again(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _wake(self) -> None:
        os.eventfd_write(self._waker, 1)

    def _end(self) -> None:
        for channel in list(self._channels):
            self._lose(channel)
        for process in list(self._watched):
            self._forget(process)
        self._selector.close()
        self._listener.close()


def _attempt(what: str, call: Callable[[], T]) -> T | None:
    """The call's result, None when it failed: one fault must never end the service of all others."""
    try:
        return call()
    except RemoteProtocolError:
        raise
    except Exception:
        _log.exception("%s failed", what)
        return None
