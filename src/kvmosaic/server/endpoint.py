"""The socket's place in the file system: claimed by one server, cleared of a dead one's remains, gone at the end.

Two servers that start at once must not take each other's fresh socket for a stale one, so the look and the claim
happen under a lock on the directory, which the kernel drops with its holder. Called by the composition root.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvmosaic.errors import SettingsError

_BACKLOG = 128


class Endpoint:
    """A listening socket and its path."""

    def __init__(self, path: Path) -> None:
        """SettingsError when a live server, another file or another user is in the way."""
        self.path = path
        _make_directory(path.parent)
        with _locked(path.parent):
            _remove_stale(path)
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                os.fchmod(self.listener.fileno(), 0o600)  # before bind: it never exists with wider rights
                self.listener.bind(str(path))
                self.listener.listen(_BACKLOG)
                self._inode = path.stat().st_ino
            except OSError as error:
                self.listener.close()
                raise SettingsError(f"--socket {path} cannot be used: {error.strerror}; use another path") from error

    def close(self) -> None:
        """Stop listening and remove the path, unless another server has it by now."""
        self.listener.close()
        with _locked(self.path.parent):
            if self.path.exists() and self.path.stat().st_ino == self._inode:
                self.path.unlink()


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = directory.stat().st_uid
    except OSError as error:
        raise SettingsError(f"--socket: {directory} cannot be made: {error.strerror}; use another path") from error
    if owner not in (0, os.geteuid()):
        raise SettingsError(
            f"--socket: {directory} belongs to uid {owner}, who could replace the socket; use a directory of your own"
        )


def _remove_stale(path: Path) -> None:
    """Remove a dead server's socket. SettingsError when something else is there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SettingsError(f"--socket {path} exists and is no socket; remove it or use another path")
    if _is_listening(path):
        raise SettingsError(f"--socket {path} belongs to a running server; stop it, or use another path for this one")
    path.unlink()


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a live server with a full backlog would block us
        return probe.connect_ex(str(path)) != errno.ECONNREFUSED


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
