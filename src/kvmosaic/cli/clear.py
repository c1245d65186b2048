"""`kvmosaic clear`: forget the objects of one model or of all."""

from __future__ import annotations

from typing import Annotated

import typer

from kvmosaic.cli.endpoint import SocketOption, ask
from kvmosaic.errors import RemoteProtocolError
from kvmosaic.protocol.messages import Clear, Cleared


def clear(
    socket: SocketOption,
    model: Annotated[str, typer.Option(help="Only this model, as `kvmosaic status` names it.")] = "",
) -> None:
    """Forget what is cached. Engines go on; what they read at the moment stays until they have read it."""
    reply = ask(socket, Clear(0, model))
    if not isinstance(reply, Cleared):
        raise RemoteProtocolError(f"Clear was answered with {type(reply).__name__}")
    print(f"{reply.objects} objects forgotten")
