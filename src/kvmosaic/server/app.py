"""Composition root: from settings to a running server to a clean end. The only place that builds the parts.

Runs on the main thread of `kvmosaic server`, which then is the loop's. Arena and socket are gone when it returns,
or, after a crash, when the kernel has cleaned up: nothing needs to be swept.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from types import FrameType

from kvmosaic.cache.cache import Cache
from kvmosaic.core.types import BootId
from kvmosaic.layout.objects import compose
from kvmosaic.memory import arena as arenas
from kvmosaic.memory.extents import ExtentPool
from kvmosaic.server import admin
from kvmosaic.server.endpoint import Endpoint
from kvmosaic.server.loop import Loop
from kvmosaic.server.machine import Memory, check_size, huge_pages_fit, read_memory
from kvmosaic.server.prefault import Prefault
from kvmosaic.server.service import Service
from kvmosaic.settings import HttpAddress, ServerSettings

_log = logging.getLogger("kvmosaic.server")

FIRST_STEP_S = 0.5
"""How long the start waits for the arena's first bytes; on a full machine it goes on without them."""


def run(settings: ServerSettings, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `announce` gets one line when clients may come. SettingsError when it cannot.

    A second signal ends the process at once.
    """
    check_size(settings, read_memory())
    with ExitStack() as stack:
        stopper = _Stopper()
        http = admin.bind(settings.http) if settings.http else None
        endpoint = Endpoint(settings.socket)
        stack.callback(endpoint.close)
        arena_fd, arena, huge_pages = _make_arena(settings.l1_bytes)
        stack.callback(os.close, arena_fd)
        stack.callback(arena.close)
        service = _build_service(settings)
        loop = Loop(endpoint.listener, arena_fd, service, time.monotonic, settings.exit_when_idle_s)
        stack.callback(loop.close)
        stopper.watch(loop)
        memory = _reserved if huge_pages else read_memory
        prefault = Prefault(arena, memory, lambda mark: loop.post(partial(service.grow, mark)))
        prefault.start()
        stack.callback(prefault.stop)
        prefault.wait_begun(FIRST_STEP_S)
        if http is not None:
            server = admin.Admin(http, partial(_ask_report, loop, service))
            server.start()
            stack.callback(server.stop)
        where = "off" if http is None else HttpAddress(*http.getsockname()[:2])
        announce(f"kvmosaic server ready: socket={settings.socket} arena={settings.l1_bytes} http={where}")
        loop.run()
        stopper.unwatch()
        _log.info("ending: sessions are closed")


def _make_arena(num_bytes: int) -> tuple[int, arenas.Arena, bool]:
    """Descriptor, mapping, and whether it got huge pages. Another process may take them between look and use."""
    for huge_pages in (True, False) if huge_pages_fit(num_bytes) else (False,):
        fd = arenas.create(num_bytes, huge_pages)
        try:
            arena = arenas.attach(fd, num_bytes)
        except OSError:
            os.close(fd)
            if not huge_pages:
                raise
            continue
        _log.info("the arena has %d bytes in %s pages", num_bytes, "huge" if huge_pages else "normal")
        return fd, arena, huge_pages
    raise AssertionError("normal pages are tried last")


def _reserved() -> Memory:
    """Huge pages were set aside when the arena was mapped; what else is free does not matter."""
    return Memory(total_bytes=0, available_bytes=1 << 62, limited_by="the huge pages")


def _build_service(settings: ServerSettings) -> Service:
    pool = ExtentPool(settings.l1_bytes)
    cache = Cache(pool, settings.eviction_policy)
    composer = partial(compose, chunk_tokens=settings.chunk_size, separate=settings.separate_object_groups)
    return Service(cache, pool, composer, BootId(secrets.token_hex(8)), time.monotonic)


def _ask_report(loop: Loop, service: Service) -> Future[admin.Report]:
    """A status report, made on the loop's thread."""
    future: Future[admin.Report] = Future()

    def answer() -> None:
        if future.set_running_or_notify_cancel():
            future.set_result(service.report())

    loop.post(answer)
    return future


class _Stopper:
    """Ends the loop at the first signal and the process at the second. Signals may come before there is a loop."""

    def __init__(self) -> None:
        self._loop: Loop | None = None
        self._stopping = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def watch(self, loop: Loop) -> None:
        """This is the loop to end."""
        self._loop = loop
        if self._stopping:
            loop.stop()

    def unwatch(self) -> None:
        """The loop has ended by itself or by us: the next signal finds nothing to end."""
        self._loop = None

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._stopping:
            os._exit(1)
        self._stopping = True
        if self._loop is not None:
            self._loop.stop()
