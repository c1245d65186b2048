"""What a user can choose, each default written once. A wrong value stops the start and names flag, value and fix.

Built by `cli` (the only reader of flags and environment) and by tests; read by the server. No I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from kvmosaic.errors import SettingsError

EVICTION_POLICIES = ("LRU",)
LOG_LEVELS = ("debug", "info", "warning", "error")

# sun_path holds 108 bytes, the closing zero included.
MAX_SOCKET_PATH_BYTES = 107
MIN_L1_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Where the admin HTTP server listens; port 0 takes any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Everything `kvmosaic server` needs to know. `chunk_size` None: chosen per model; `http` None: no HTTP.

    `exit_when_idle_s` ends the server that long after its last engine left (or after the start); None: never.
    Not slotted, so that the command line can read the defaults off the class.
    """

    l1_size_gb: float
    socket: Path
    chunk_size: int | None = None
    eviction_policy: str = "LRU"
    separate_object_groups: bool = True
    http: HttpAddress | None = HttpAddress("127.0.0.1", 9190)
    log_level: str = "info"
    exit_when_idle_s: float | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.l1_size_gb) or self.l1_bytes < MIN_L1_BYTES:
            raise SettingsError(
                f"--l1-size-gb {self.l1_size_gb} is not a usable size; "
                f"use a number of GiB from {MIN_L1_BYTES / 2**30:g} up"
            )
        if self.chunk_size is not None and self.chunk_size <= 0:
            raise SettingsError(
                f"--chunk-size {self.chunk_size} is not a positive number of tokens; use 'auto' or a multiple "
                "of the engine's block size"
            )
        _check_choice("--eviction-policy", self.eviction_policy, EVICTION_POLICIES)
        _check_choice("--log-level", self.log_level, LOG_LEVELS)
        check_socket_path(self.socket)
        if self.exit_when_idle_s is not None and not self.exit_when_idle_s >= 0:
            raise SettingsError(f"--exit-when-idle-s {self.exit_when_idle_s} is not a time; use 0 or more")

    @property
    def l1_bytes(self) -> int:
        """The arena's size, whole MiB."""
        return int(self.l1_size_gb * 2**10) << 20 if math.isfinite(self.l1_size_gb) else 0


def default_socket_path(chosen: str | None, uid: int) -> Path:
    """Where server and engines of one user meet when no flag or key says otherwise. `chosen`: $KVMOSAIC_SOCKET.

    Not below $XDG_RUNTIME_DIR, which a service or a container often lacks where a login has it.
    """
    return Path(chosen) if chosen else Path(f"/tmp/kvmosaic-{uid}/server.sock")


def check_socket_path(path: Path) -> None:
    """SettingsError unless a Unix socket can have this path."""
    num_bytes = len(str(path).encode())
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise SettingsError(
            f"--socket {path} has {num_bytes} bytes; a Unix socket path holds at most "
            f"{MAX_SOCKET_PATH_BYTES}: use a shorter one"
        )


def parse_chunk_size(text: str) -> int | None:
    """The value of --chunk-size: 'auto' or a number of tokens."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"--chunk-size {text!r} is not a number; use 'auto' or a number of tokens") from None


def parse_http(text: str) -> HttpAddress | None:
    """The value of --http: 'off' or HOST:PORT."""
    if text == "off":
        return None
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and port.isascii() and int(port) < 65536):
        raise SettingsError(f"--http {text!r} is not an address; use HOST:PORT (127.0.0.1:9190) or 'off'")
    return HttpAddress(host.strip("[]"), int(port))


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsError(f"{flag} {value!r} is unknown; use one of: {', '.join(choices)}")
