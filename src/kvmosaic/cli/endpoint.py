"""The --socket option, the same for every command, and a connection to the server behind it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvmosaic.client.connection import Connection
from kvmosaic.errors import MosaicError
from kvmosaic.protocol.messages import Failed, Reply, Request
from kvmosaic.settings import check_socket_path, default_socket_path

TIMEOUT_S = 5.0


def default_socket() -> Path:
    """Where the user's server is when nobody says otherwise."""
    return default_socket_path(os.environ.get("KVMOSAIC_SOCKET"), os.getuid())


SocketOption = Annotated[
    Path,
    typer.Option(
        "--socket",
        default_factory=default_socket,
        show_default="$KVMOSAIC_SOCKET, else /tmp/kvmosaic-UID/server.sock",
        help="Unix socket of the server.",
    ),
]


@contextmanager
def operator(path: Path) -> Iterator[Connection]:
    """A session of an operator. ServerLost when there is no server."""
    check_socket_path(path)
    connection = Connection.connect(path)
    try:
        connection.hello("operator", "", TIMEOUT_S)
        yield connection
    finally:
        connection.close()


def ask(path: Path, request: Request) -> Reply:
    """The reply to one request. MosaicError with the server's reason when it failed."""
    with operator(path) as connection:
        reply = connection.request(request, TIMEOUT_S)
    if isinstance(reply, Failed):
        raise MosaicError(reply.reason)
    return reply
