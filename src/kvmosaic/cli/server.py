"""`kvmosaic server`: run the node's cache."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from kvmosaic.cli.endpoint import SocketOption
from kvmosaic.server import app
from kvmosaic.settings import (
    EVICTION_POLICIES,
    LOG_LEVELS,
    ServerSettings,
    parse_chunk_size,
    parse_http,
)


def server(
    l1_size_gb: Annotated[float, typer.Option(help="Size of the cache in memory, in GiB, for the whole node.")],
    socket: SocketOption,
    chunk_size: Annotated[str, typer.Option(help="Tokens per chunk, or 'auto': chosen per model.")] = "auto",
    eviction_policy: Annotated[
        str, typer.Option(help=f"What goes first when it is full: {', '.join(EVICTION_POLICIES)}.")
    ] = ServerSettings.eviction_policy,
    separate_object_groups: Annotated[
        bool, typer.Option(help="One object per kind and reach, or everything in one full-attention object.")
    ] = ServerSettings.separate_object_groups,
    http: Annotated[str, typer.Option(help="HOST:PORT of /health, /status and /metrics, or 'off'.")] = str(
        ServerSettings.http
    ),
    log_level: Annotated[str, typer.Option(help=", ".join(LOG_LEVELS))] = ServerSettings.log_level,
    exit_when_idle_s: Annotated[
        float | None, typer.Option(help="End this long after the last engine left.")
    ] = ServerSettings.exit_when_idle_s,
) -> None:
    """Run the node's KV cache server until SIGTERM or Ctrl-C."""
    settings = ServerSettings(
        l1_size_gb=l1_size_gb,
        socket=socket,
        chunk_size=parse_chunk_size(chunk_size),
        eviction_policy=eviction_policy,
        separate_object_groups=separate_object_groups,
        http=parse_http(http),
        log_level=log_level,
        exit_when_idle_s=exit_when_idle_s,
    )
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    app.run(settings, lambda line: print(line, flush=True))
