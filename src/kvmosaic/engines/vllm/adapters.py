"""What tells LoRA adapters apart beyond the name and path that the engine's block hashes hold.

The engine reads an adapter's files when it loads it, which may be long before a request or after files were replaced.
So an adapter is served only as long as its files are those of the first request; once they differ, or a reload in
place is asked for, nobody can say which weights a request was computed with, and it is neither stored nor looked up.
Reads directories on the engine's scheduler thread: top-level entries only.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class Adapters:
    """The adapters one engine has seen, by id, name and path."""

    def __init__(self) -> None:
        self._fingerprints: dict[tuple[int, str, str], bytes | None] = {}

    def fingerprint(self, lora_request: Any) -> bytes | None:  # Any: vLLM's LoRARequest
        """Goes into the digests of the request's chunks; empty without an adapter, None when it is not served."""
        if lora_request is None:
            return b""
        key = (lora_request.lora_int_id, lora_request.lora_name, lora_request.lora_path)
        now = _seal(Path(lora_request.lora_path))
        known = self._fingerprints.setdefault(key, now)
        if known is not None and (known != now or getattr(lora_request, "load_inplace", False)):
            logger.warning("adapter %s was replaced in place; it is not cached any more", lora_request.lora_name)
            known = self._fingerprints[key] = None
        return known


def _seal(path: Path) -> bytes:
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    seal = hashlib.sha256(str(path).encode())
    for file in files:
        status = file.stat()
        seal.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return seal.digest()
