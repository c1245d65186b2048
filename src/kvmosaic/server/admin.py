"""Health, status and metrics over HTTP, read-only, from snapshots that the loop makes between two requests.

A snapshot is asked for through the loop's post(), so a loop that no longer turns shows as unhealthy. Knows nothing
of sessions or the cache. uvicorn runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvmosaic.errors import SettingsError
from kvmosaic.settings import HttpAddress

Report = dict[str, Any]  # Any: the JSON object of protocol.messages.StatusReport
AskReport = Callable[[], "Future[Report]"]

SNAPSHOT_TIMEOUT_S = 2.0
_STOP_TIMEOUT_S = 2.0


def bind(address: HttpAddress) -> socket.socket:
    """A listening socket; SettingsError when the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise SettingsError(
            f"--http {address} cannot be used: {error.strerror or error}; use another HOST:PORT or --http off"
        ) from error


class Admin:
    """The HTTP server on its thread."""

    def __init__(self, listener: socket.socket, ask_report: AskReport) -> None:
        config = uvicorn.Config(
            build_app(ask_report), log_config=None, access_log=False, lifespan="off", loop="asyncio"
        )
        self._listener = listener
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="kvmosaic-admin", daemon=True)

    def start(self) -> None:
        """Begin to serve; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """End it; a request that hangs is abandoned after two seconds."""
        self._server.should_exit = True
        self._thread.join(_STOP_TIMEOUT_S)
        self._listener.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])


def build_app(ask_report: AskReport) -> Starlette:
    """The ASGI application."""

    async def snapshot() -> Report | None:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(ask_report()), SNAPSHOT_TIMEOUT_S)
        except TimeoutError:
            return None

    async def health(_request: Request) -> Response:
        report = await snapshot()
        if report is None:
            return _unavailable()
        return JSONResponse({"status": "ok", "boot_id": report["boot_id"], "uptime_s": report["uptime_s"]})

    async def status(_request: Request) -> Response:
        report = await snapshot()
        return _unavailable() if report is None else JSONResponse(report)

    async def metrics(_request: Request) -> Response:
        report = await snapshot()
        if report is None:
            return _unavailable()
        registry = CollectorRegistry()
        registry.register(_ReportCollector(report))
        return PlainTextResponse(generate_latest(registry), media_type="text/plain; version=0.0.4")

    routes = [Route("/health", health), Route("/status", status), Route("/metrics", metrics)]
    return Starlette(routes=routes)


class _ReportCollector(Collector):
    """One report as Prometheus metrics."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterable[Metric]:
        for name, value in self._report.items():
            if isinstance(value, (int, float)) and name != "pid":
                yield GaugeMetricFamily(f"kvmosaic_{name}", _words(name), value=value)
        for name, value in self._report["counters"].items():
            yield CounterMetricFamily(f"kvmosaic_{name}", _words(name), value=value)
        for name in ("objects", "bytes", "leases"):
            yield self._per_model(GaugeMetricFamily, name)
        for name in ("lookups", "hits", "hit_chunks"):
            yield self._per_model(CounterMetricFamily, name)

    def _per_model(self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str) -> Metric:
        family = kind(f"kvmosaic_model_{name}", f"{_words(name)} of a model", labels=["model", "namespace"])
        for model in self._report["models"]:
            family.add_metric([model["model"], model["namespace"]], model[name])
        return family


def _words(name: str) -> str:
    return name.replace("_", " ")


def _unavailable() -> Response:
    return JSONResponse({"status": "the server's loop does not answer"}, status_code=503)
