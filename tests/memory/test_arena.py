import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmosaic.core.types import pack_extents
from kvmosaic.errors import Refused, RemoteProtocolError
from kvmosaic.memory import arena as arenas
from kvmosaic.memory.arena import Arena

SIZE = 1 << 20


@pytest.fixture
def fd() -> Iterator[int]:
    fd = arenas.create(SIZE)
    yield fd
    os.close(fd)


@pytest.fixture
def arena(fd: int) -> Iterator[Arena]:
    arena = arenas.attach(fd, SIZE)
    yield arena
    arena.check()
    arena.close()


def test_two_mappings_share_every_byte(fd: int, arena: Arena) -> None:
    other = arenas.attach(fd, SIZE)
    arena.buffer[100:103] = b"abc"
    assert bytes(other.buffer[99:104]) == b"\0abc\0"
    other.close()


def test_the_mapping_outlives_its_descriptor() -> None:
    fd = arenas.create(SIZE)
    arena = arenas.attach(fd, SIZE)
    os.close(fd)
    arena.buffer[SIZE - 1] = 7
    assert arena.buffer[SIZE - 1] == 7
    arena.close()


@pytest.mark.parametrize("size", [0, SIZE // 2, SIZE * 2])
def test_nobody_can_change_the_size(fd: int, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(fd, size)


def test_only_its_owner_may_open_it_again_and_it_is_not_inherited(fd: int) -> None:
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(fd)


def test_an_old_kernel_gives_the_same_arena_without_the_exec_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.memfd_create

    def old_kernel(name: str, flags: int) -> int:
        if flags & 0x8:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", old_kernel)
    fd = arenas.create(SIZE)
    arenas.attach(fd, SIZE).close()
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    os.close(fd)


def test_other_refusals_of_the_kernel_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(OSError, match="Too many"):
        arenas.create(SIZE)


def test_a_size_that_cannot_be_had_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Invalid"):
        arenas.create(-1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_mapping_that_cannot_be_had_is_an_error_of_the_system() -> None:
    fd = arenas.create(1 << 60)
    with pytest.raises(OSError, match="mmap"):
        arenas.attach(fd, 1 << 60)
    os.close(fd)


@pytest.mark.parametrize("announced", [0, SIZE - 1, SIZE * 2])
def test_another_size_than_announced_is_refused(fd: int, announced: int) -> None:
    with pytest.raises(Refused, match=f"{SIZE} bytes, but {announced}"):
        arenas.attach(fd, announced)


def test_memory_that_could_shrink_is_refused() -> None:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    with pytest.raises(Refused, match="not sealed"):
        arenas.attach(fd, SIZE)
    os.close(fd)


def test_extents_become_writable_views(arena: Arena) -> None:
    first, last = arena.view(pack_extents([(4096, 2), (SIZE - 1, 1)]))
    first[:] = b"xy"
    last[:] = b"z"
    assert bytes(arena.buffer[4096:4098]) == b"xy"
    assert arena.buffer[SIZE - 1] == ord("z")


@pytest.mark.parametrize("extent", [(SIZE, 1), (0, SIZE + 1), (SIZE - 1, 2), (1 << 63, 1 << 63)])
def test_extents_outside_the_arena_are_the_peers_fault(arena: Arena, extent: tuple[int, int]) -> None:
    with pytest.raises(RemoteProtocolError, match="outside"):
        arena.view(pack_extents([(0, 1), extent]))


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_populate_makes_exactly_the_range_resident(fd: int, arena: Arena) -> None:
    assert resident_bytes(fd) == 0
    arena.populate(mmap.PAGESIZE, 4 * mmap.PAGESIZE)
    assert resident_bytes(fd) == 4 * mmap.PAGESIZE


def test_populate_works_on_a_kernel_without_the_advice(fd: int, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "_MADV_POPULATE_WRITE", 9999)
    arena.populate(0, 2 * mmap.PAGESIZE)
    assert resident_bytes(fd) == 2 * mmap.PAGESIZE


def test_close_unmaps_at_once_even_while_views_exist(arena: Arena) -> None:
    view = arena.buffer[:10]
    maps = Path("/proc/self/maps")
    line = f"{arena.address:x}-"
    assert line in maps.read_text()
    arena.close()
    assert line not in maps.read_text()
    arena.close()
    with pytest.raises(AssertionError, match="closed"):
        _ = arena.buffer
    del view


def test_a_forked_child_does_not_have_the_mapping(arena: Arena) -> None:
    code = f"""
import os, sys
from kvmosaic.memory import arena as arenas
fd = arenas.create({SIZE})
arena = arenas.attach(fd, {SIZE})
child = os.fork()
if child == 0:
    os._exit(f"{{arena.address:x}}-" in open("/proc/self/maps").read())
assert f"{{arena.address:x}}-" in open("/proc/self/maps").read()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_of_it_is_in_a_file_system(fd: int) -> None:
    before = os.listdir("/dev/shm")
    other = arenas.create(SIZE)
    assert os.listdir("/dev/shm") == before
    assert "memfd:" in os.readlink(f"/proc/self/fd/{fd}")
    assert fcntl.fcntl(fd, 1034) & 0x7 == 0x7
    os.close(other)


def test_only_resident_bytes_are_mapped_ahead() -> None:
    num_bytes = 4 << 20
    fd = arenas.create(num_bytes)
    server, worker = arenas.attach(fd, num_bytes), arenas.attach(fd, num_bytes)
    server.populate(0, 2 << 20)

    assert worker.map_resident(0, 2 << 20)
    assert not worker.map_resident(0, num_bytes)
    assert not worker.map_resident(2 << 20, 2 << 20)
    assert os.fstat(fd).st_blocks * 512 == 2 << 20, "nothing became resident by asking"
    for mapping in (server, worker):
        mapping.close()
    os.close(fd)
