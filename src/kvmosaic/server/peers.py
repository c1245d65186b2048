"""Who is at the other end of a socket, and is that process surely dead? Answered by the kernel, never by a time-out.

End of stream proves nothing: a forked child can hold a dead process's socket, and a live process can close its
socket while it still maps the arena. A pidfd that became readable is proof: its process can touch no memory again.
Used by the loop's thread only.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct

_SO_PEERPIDFD = 77  # Linux 6.5; not named by Python
_UCRED = struct.Struct("iII")
_NOBODY = (0, 0)
_log = logging.getLogger("kvmosaic.server")


class Process:
    """One peer process. `pidfd` is None when its death cannot be proven; such a process may not map the arena."""

    __slots__ = ("pid", "pidfd", "uid")

    def __init__(self, pid: int, uid: int, pidfd: int | None) -> None:
        self.pid = pid
        self.uid = uid
        self.pidfd = pidfd

    def __repr__(self) -> str:
        return f"pid {self.pid}"

    def is_dead(self) -> bool:
        """Proven dead."""
        if self.pidfd is None:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))


class Processes:
    """All peer processes that have a session or may still touch the arena, one object and one pidfd each."""

    def __init__(self) -> None:
        self._by_identity: dict[tuple[int, int], Process] = {}
        # Before Linux 6.9 all pidfds are one inode of the file system of anonymous inodes, as an eventfd is.
        eventfd = os.eventfd(0)
        self._anonymous_device = os.fstat(eventfd).st_dev
        os.close(eventfd)

    def meet(self, sock: socket.socket) -> Process:
        """The process that connected this socket, known from an earlier session or new."""
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        pidfd = _peer_pidfd(sock, pid)
        if pidfd is None:
            return Process(pid, uid, None)
        identity = self._identity(pid, pidfd)
        # Where the identity is only a pid, a dead process may have left it to this one.
        known = self._by_identity.get(identity)
        if known is not None and not known.is_dead():
            os.close(pidfd)
            return known
        if identity == _NOBODY:
            os.close(pidfd)
            return Process(pid, uid, None)
        process = Process(pid, uid, pidfd)
        self._by_identity[identity] = process
        return process

    def forget(self, process: Process) -> None:
        """Close the pidfd: the process is dead, or has neither a session nor the arena."""
        if process.pidfd is None:
            return
        identity = self._identity(process.pid, process.pidfd)
        if self._by_identity.get(identity) is process:
            del self._by_identity[identity]
        os.close(process.pidfd)
        process.pidfd = None

    def check(self) -> None:
        """Every known process can be watched."""
        for process in self._by_identity.values():
            assert process.pidfd is not None

    def __len__(self) -> int:
        return len(self._by_identity)

    def _identity(self, pid: int, pidfd: int) -> tuple[int, int]:
        """Equal for two pidfds of one process. The inode says it also for a process of another pid namespace,
        which has pid 0 here."""
        stat = os.fstat(pidfd)
        if stat.st_dev != self._anonymous_device:
            return stat.st_dev, stat.st_ino
        return 0, pid


def _peer_pidfd(sock: socket.socket, pid: int) -> int | None:
    """A pidfd of the process that connected, None when the kernel cannot give one."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            _log.warning("no pidfd for pid %d: %s", pid, error)
            return None
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None
