from pathlib import Path

import pytest

from kvmosaic.errors import SettingsError
from kvmosaic.server.machine import Memory, check_size, huge_pages_fit, read_memory
from kvmosaic.settings import ServerSettings

GIB = 1 << 30


class Machine:
    """/proc and /sys/fs/cgroup of a made-up machine with 64 GiB, 40 of them available."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.write(self.proc / "meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {40 << 20} kB\nX: 1\n")

    def write(self, path: Path, text: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def read(self) -> Memory:
        return read_memory(self.proc, self.cgroups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_limits_it_is_the_machine(machine: Machine) -> None:
    assert machine.read() == Memory(64 * GIB, 40 * GIB, "this machine")


def test_the_tightest_cgroup_above_us_binds(machine: Machine) -> None:
    machine.write(machine.proc / "self" / "cgroup", "0::/pod/container")
    pod = machine.cgroups / "pod"
    for directory, limit, used in ((pod, 16 * GIB, 15 * GIB), (pod / "container", "max", 1 * GIB)):
        machine.write(directory / "memory.max", limit)
        machine.write(directory / "memory.current", used)
    machine.write(pod / "memory.stat", f"anon 5\ninactive_file {2 * GIB}\nactive_file 7")
    memory = machine.read()
    assert memory.total_bytes == 16 * GIB
    assert memory.available_bytes == 3 * GIB, "page cache gives way"
    assert "pod" in memory.limited_by


def test_inside_a_container_the_root_is_its_own_cgroup(machine: Machine) -> None:
    machine.write(machine.proc / "self" / "cgroup", "0::/what/only/the/host/sees")
    machine.write(machine.cgroups / "memory.max", 8 * GIB)
    machine.write(machine.cgroups / "memory.current", 3 * GIB)
    assert machine.read().available_bytes == 5 * GIB


def test_version_one_counts_too(machine: Machine) -> None:
    machine.write(machine.proc / "self" / "cgroup", "9:cpu:/a\n4:memory:/a\n0::/")
    directory = machine.cgroups / "memory" / "a"
    machine.write(directory / "memory.limit_in_bytes", 8 * GIB)
    machine.write(directory / "memory.usage_in_bytes", 6 * GIB)
    machine.write(directory / "memory.stat", f"total_inactive_file {GIB}")
    assert machine.read() == Memory(8 * GIB, 3 * GIB, f"the cgroup {directory}")


def test_a_limit_beyond_the_machine_does_not_bind(machine: Machine) -> None:
    machine.write(machine.proc / "self" / "cgroup", "4:memory:/")
    machine.write(machine.cgroups / "memory" / "memory.limit_in_bytes", 9223372036854771712)
    machine.write(machine.cgroups / "memory" / "memory.usage_in_bytes", GIB)
    assert machine.read() == Memory(64 * GIB, 40 * GIB, "this machine")


def test_this_machine_can_be_read() -> None:
    memory = read_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_an_arena_that_can_never_fit_is_refused_with_the_numbers_and_the_fix() -> None:
    memory = Memory(10 * GIB, 2 * GIB, "the cgroup x")
    check_size(ServerSettings(l1_size_gb=9.5, socket=Path("s")), memory)
    with pytest.raises(SettingsError) as refused:
        check_size(ServerSettings(l1_size_gb=9.6, socket=Path("s")), memory)
    for part in ("--l1-size-gb 9.6", str(10 * GIB), "the cgroup x", "95%", "--l1-size-gb 9.5 or less"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("free", "reserved", "num_bytes", "fits"),
    [(64, 0, 128 << 20, True), (64, 1, 128 << 20, False), (64, 0, 129 << 20, False), (0, 0, 2 << 20, False)],
)
def test_huge_pages_are_taken_when_enough_of_them_are_free(
    machine: Machine, free: int, reserved: int, num_bytes: int, fits: bool
) -> None:
    pages = f"HugePages_Free: {free}\nHugePages_Rsvd: {reserved}\nHugepagesize: 2048 kB"
    machine.write(machine.proc / "meminfo", pages)

    assert huge_pages_fit(num_bytes, machine.proc) is fits
    machine.write(machine.proc / "meminfo", "MemTotal: 1 kB")
    assert not huge_pages_fit(num_bytes, machine.proc)
