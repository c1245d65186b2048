"""How much memory this machine, or the cgroup around this process, has and has left. Reads /proc and /sys/fs/cgroup.

Called at the start (is the arena too large?) and by the prefault thread before every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvmosaic.errors import SettingsError
from kvmosaic.settings import ServerSettings

MAX_SHARE = 0.95
"""Largest part of the memory that the arena may take."""


@dataclass(frozen=True, slots=True)
class Memory:
    """`total_bytes` and `available_bytes` are the tightest of the machine and every cgroup limit above us."""

    total_bytes: int
    available_bytes: int
    limited_by: str


def read_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """What this process can use now."""
    kib = {name: value.split()[0] for name, value in _fields(proc / "meminfo", ":")}
    limits = [Memory(int(kib["MemTotal"]) << 10, int(kib["MemAvailable"]) << 10, "this machine")]
    for directory, names in _memory_cgroups(proc, cgroups):
        limit, used = _number(directory / names[0]), _number(directory / names[1])
        if limit is None or used is None:
            continue
        # Page cache counts as used, but gives way.
        cache = sum(int(v) for n, v in _fields(directory / "memory.stat", " ") if n == names[2])
        limits.append(Memory(limit, max(0, limit - used + cache), f"the cgroup {directory}"))
    total = min(limits, key=lambda memory: memory.total_bytes)
    return Memory(total.total_bytes, min(m.available_bytes for m in limits), total.limited_by)


def huge_pages_fit(num_bytes: int, proc: Path = Path("/proc")) -> bool:
    """Whether the kernel has reserved enough huge pages that are free, and the size is whole ones."""
    fields = {name: int(value.split()[0]) for name, value in _fields(proc / "meminfo", ":")}
    free, page = fields.get("HugePages_Free", 0) - fields.get("HugePages_Rsvd", 0), fields.get("Hugepagesize", 0) << 10
    return page > 0 and num_bytes % page == 0 and num_bytes <= free * page


def check_size(settings: ServerSettings, memory: Memory) -> None:
    """SettingsError when the arena can never fit."""
    largest = int(memory.total_bytes * MAX_SHARE)
    if settings.l1_bytes > largest:
        raise SettingsError(
            f"--l1-size-gb {settings.l1_size_gb:g} asks for {settings.l1_bytes} bytes, but {memory.limited_by} has "
            f"{memory.total_bytes} and at most {MAX_SHARE:.0%} can be taken; "
            f"use --l1-size-gb {int(largest / 2**30 * 100) / 100:g} or less"
        )


_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _memory_cgroups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Every cgroup directory whose memory limit may bind us, from ours up to the root."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _V1
        else:
            continue
        # Inside a container the path may name what the host sees; then only the root exists here.
        directory = root / path.lstrip("/")
        while directory != root:
            yield directory, names
            directory = directory.parent
        yield root, names


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _fields(path: Path, separator: str) -> Iterator[tuple[str, str]]:
    for line in _lines(path):
        name, _, value = line.partition(separator)
        yield name, value


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text().splitlines() if line]
    except OSError:
        return []
