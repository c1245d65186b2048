"""The `kvmosaic.*` keys of vLLM's `kv_connector_extra_config`, checked at the door.

Owns the names, types, defaults and messages; both halves of the connector read the same frozen object.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvmosaic.errors import SettingsError
from kvmosaic.settings import default_socket_path

PREFIX = "kvmosaic."
POLICIES = ("recompute", "fail")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may say about the connector; every default once.

    `required` makes an engine wait at start for the server instead of running without it. `model_tag` names the
    weights in place of a fingerprint of their files. `weights_epoch` tells apart weights that were replaced in
    place. `autostart` is the size in GB of a server to start when none listens, None for never.
    `load_failure_policy` is what vLLM does with a request whose load failed.
    """

    socket: Path
    required: bool = False
    model_tag: str | None = None
    weights_epoch: str = "0"
    lookup_timeout_ms: float = 50.0
    autostart: float | None = None
    load_failure_policy: str = "recompute"


def parse_options(extra_config: Mapping[str, object], environ: Mapping[str, str]) -> Options:
    """Read the `kvmosaic.*` keys; raise SettingsError that names the key, its value and the fix."""
    given = {key: value for key, value in extra_config.items() if key.startswith(PREFIX)}
    unknown = [key for key in given if key not in _READERS]
    if unknown:
        raise SettingsError(_unknown_key(unknown[0]))
    values = {key.removeprefix(PREFIX): _READERS[key](key, value) for key, value in given.items()}
    values.setdefault("socket", default_socket_path(environ.get("KVMOSAIC_SOCKET"), os.getuid()))
    return Options(**values)  # type: ignore[arg-type]  # each reader returns its field's type


def _unknown_key(key: str) -> str:
    nearest = difflib.get_close_matches(key, _READERS, n=1, cutoff=0.0)[0]
    return f"kv_connector_extra_config has the unknown key {key!r}; did you mean {nearest!r}?"


def _wrong(key: str, value: object, want: str) -> SettingsError:
    return SettingsError(f"{key} is {value!r}; it must be {want}")


def _path(key: str, value: object) -> Path:
    if not isinstance(value, str) or not value:
        raise _wrong(key, value, "the path of the server's socket, as a string")
    return Path(value)


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(key, value, "a non-empty string")
    return value


def _epoch(key: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _wrong(key, value, "a string or a whole number")
    return str(value)


def _policy(key: str, value: object) -> str:
    if value not in POLICIES:
        raise _wrong(key, value, " or ".join(map(repr, POLICIES)))
    return str(value)


def _positive(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise _wrong(key, value, "a number above 0")
    return float(value)


_READERS: dict[str, Callable[[str, object], object]] = {
    "kvmosaic.socket": _path,
    "kvmosaic.required": _flag,
    "kvmosaic.model_tag": _text,
    "kvmosaic.weights_epoch": _epoch,
    "kvmosaic.lookup_timeout_ms": _positive,
    "kvmosaic.autostart": _positive,
    "kvmosaic.load_failure_policy": _policy,
}
