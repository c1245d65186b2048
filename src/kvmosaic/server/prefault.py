"""Makes the arena resident step by step in the background, and only while the machine has memory to spare.

Pages are charged to whoever touches them first, so the server touches them all; reservations stay below the mark.
With less memory free than wanted the arena starts with what there is, and grows when more becomes free.
Runs on a thread of its own; tells each new mark to `grow`, which must be safe to call from it.
"""

from __future__ import annotations

import errno
import logging
import sys
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvmosaic.memory.arena import Arena
from kvmosaic.server.machine import Memory

STEP_BYTES = 64 << 20
RETRY_S = 0.1

_log = logging.getLogger("kvmosaic.server")


class Prefault:
    """One background pass over the arena."""

    def __init__(self, arena: Arena, read_memory: Callable[[], Memory], grow: Callable[[int], None]) -> None:
        self._arena = arena
        self._read_memory = read_memory
        self._grow = grow
        self._stopping = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvmosaic-prefault", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """End it, within one step. The arena is not touched after that."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def wait_begun(self, timeout_s: float) -> bool:
        """Wait until the first step is resident, so that the first engine finds room."""
        return self._begun.wait(timeout_s)

    def wait_done(self, timeout_s: float) -> bool:
        """Wait until the whole arena is resident."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        total = self._arena.num_bytes
        if not sys.stderr.isatty():
            for _ in self._marks():
                pass
        else:
            columns = (TextColumn("making the arena resident"), BarColumn(), DownloadColumn(binary_units=True))
            with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task("", total=total)
                for mark in self._marks():
                    bar.update(task, completed=mark)
        if not self._stopping.is_set():
            _log.info("the whole arena is resident: %d bytes", total)

    def _marks(self) -> Iterator[int]:
        """Every mark reached, until all is resident or stop()."""
        mark, total, waiting = 0, self._arena.num_bytes, False
        while mark < total and not self._stopping.is_set():
            step = min(STEP_BYTES, total - mark)
            if self._has_room(step) and self._populate(mark, step):
                mark, waiting = mark + step, False
                self._grow(mark)
                self._begun.set()
                yield mark
                continue
            if not waiting:
                _log.warning("little memory is free: the arena has %d of %d bytes for now", mark, total)
                waiting = True
            self._stopping.wait(RETRY_S)

    def _has_room(self, step: int) -> bool:
        """A margin stays for everyone else on the machine."""
        memory = self._read_memory()
        margin = max(256 << 20, memory.total_bytes * 3 // 100)
        return memory.available_bytes - step > margin

    def _populate(self, mark: int, step: int) -> bool:
        try:
            self._arena.populate(mark, step)
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.EFAULT):
                raise
            return False
        return True
