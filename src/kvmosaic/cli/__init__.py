"""The `kvmosaic` command: one file per subcommand. Flags and environment variables end here."""

from __future__ import annotations

import sys

import typer

from kvmosaic.cli import clear, demo, server, status
from kvmosaic.errors import MosaicError

__all__ = ["main"]


def main() -> None:
    """Entry point of the `kvmosaic` script."""
    app = typer.Typer(
        help="The KV cache outside the engine, for every hybrid-attention model.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command("server")(server.server)
    app.command("status")(status.status)
    app.command("clear")(clear.clear)
    app.command("demo")(demo.demo)
    try:
        app()
    except MosaicError as error:
        print(f"kvmosaic: {error}", file=sys.stderr)
        sys.exit(2)
