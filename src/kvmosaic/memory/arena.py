"""The shared memory that holds the objects: a sealed memfd, mapped by the server and by every worker.

`create` makes the descriptor, `attach` maps it; the descriptor stays the caller's to send or close. It has no
name in any file system, so it is gone with the last process that holds it. The arena knows bytes, never
objects or keys. A view dies with close(): whoever closes guarantees that no copy runs.
Methods may be called from any thread; close() and the last use must be ordered by the caller.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from contextlib import suppress

from kvmosaic.core.types import unpack_extents
from kvmosaic.errors import Refused, RemoteProtocolError

# Constants that Python 3.11 does not name.
_MFD_NOEXEC_SEAL = 0x0008
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 0x1, 0x2, 0x4
_SIZE_SEALS = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23

# Python's own mmap object cannot be unmapped while a view of it exists, and keeps a copy of the descriptor.
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_MAP_FAILED = ctypes.c_void_p(-1).value


def create(num_bytes: int, huge_pages: bool = False) -> int:
    """A descriptor of anonymous shared memory whose size nobody can change any more. Takes no pages yet.

    With `huge_pages` it comes from the kernel's reserved pool; attach() raises OSError when that is too small for it.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge_pages else 0)
    try:
        fd = os.memfd_create("kvmosaic-arena", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 6.3 does not know the flag
            raise
        fd = os.memfd_create("kvmosaic-arena", flags)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SIZE_SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def attach(fd: int, num_bytes: int) -> Arena:
    """Map the arena behind a descriptor; Refused unless it has exactly this size and cannot lose it."""
    size = os.fstat(fd).st_size
    if size != num_bytes or num_bytes <= 0:
        raise Refused(f"the arena has {size} bytes, but {num_bytes} were announced")
    # A file that can shrink would turn any later read into SIGBUS.
    if not fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK:
        raise Refused("the arena's size is not sealed")
    address = _LIBC.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        raise _last_error("mmap")
    arena = Arena(address, num_bytes)
    # A forked child must neither keep the memory alive nor be able to write it.
    arena._advise(0, num_bytes, mmap.MADV_DONTFORK)
    return arena


class Arena:
    """One mapping of the shared memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes
        array = (ctypes.c_ubyte * num_bytes).from_address(address)
        self._buffer: memoryview | None = memoryview(array).cast("B")

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable."""
        assert self._buffer is not None, "the arena is closed"
        return self._buffer

    def view(self, extents: bytes) -> list[memoryview]:
        """One writable view per extent; RemoteProtocolError when one lies outside the arena."""
        buffer = self.buffer
        views = []
        for offset, length in unpack_extents(extents):
            if offset + length > self.num_bytes:
                raise RemoteProtocolError(
                    f"extent [{offset}, {offset + length}) lies outside an arena of {self.num_bytes} bytes"
                )
            views.append(buffer[offset : offset + length])
        return views

    def populate(self, offset: int, length: int) -> None:
        """Make [offset, offset + length) resident. OSError ENOMEM when memory is short.

        The range must not hold objects yet: the fallback for Linux before 5.14 writes zeros.
        """
        assert offset % mmap.PAGESIZE == 0, "only whole pages can be populated"
        assert 0 <= offset <= offset + length <= self.num_bytes, "a range inside the arena"
        try:
            self._advise(offset, length, _MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            ctypes.memset(self.address + offset, 0, length)

    def map_resident(self, offset: int, length: int) -> bool:
        """Enter [offset, offset + length) into this process's page tables if all of it is resident; whether it is.

        Without this the first copy of each page pays for a page fault, several times the price of the copy. Never
        makes a page resident: it would be charged to this process.
        """
        pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        if _LIBC.mincore(self.address + offset, length, pages) != 0 or not _all_odd(bytes(pages)):
            return False
        # Where this fails, on Linux before 5.14 or for want of page tables, faults are taken one by one.
        with suppress(OSError):
            self._advise(offset, length, _MADV_POPULATE_READ)
        return True

    def close(self) -> None:
        """Unmap at once. A second call does nothing."""
        if self._buffer is None:
            return
        self._buffer = None
        if _LIBC.munmap(self.address, self.num_bytes) != 0:
            raise _last_error("munmap")

    def check(self) -> None:
        """The buffer spans the mapping, or is gone."""
        assert self._buffer is None or self._buffer.nbytes == self.num_bytes

    def _advise(self, offset: int, length: int, advice: int) -> None:
        assert self._buffer is not None, "the arena is closed"
        if _LIBC.madvise(self.address + offset, length, advice) != 0:
            raise _last_error("madvise")


def _all_odd(flags: bytes) -> bool:
    """Whether the lowest bit of every byte is set; the others mean nothing. One step, as it keeps the interpreter."""
    ones = int.from_bytes(b"\x01" * len(flags))
    return int.from_bytes(flags) & ones == ones


def _last_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
