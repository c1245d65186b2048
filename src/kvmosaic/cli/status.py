"""`kvmosaic status`: what the server holds, for people or as JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from kvmosaic.cli.endpoint import SocketOption, ask
from kvmosaic.errors import RemoteProtocolError
from kvmosaic.protocol.messages import Status, StatusReport

Report = dict[str, Any]  # Any: the JSON object of protocol.messages.StatusReport


def status(
    socket: SocketOption,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as one JSON object.")] = False,
) -> None:
    """Show what the server holds and who uses it."""
    reply = ask(socket, Status(0))
    if not isinstance(reply, StatusReport):
        raise RemoteProtocolError(f"Status was answered with {type(reply).__name__}")
    if as_json:
        print(json.dumps(reply.report, indent=2))
        return
    console = Console()
    console.print(_summary(reply.report))
    console.print(_models(reply.report))
    console.print(_engines(reply.report))


def _summary(report: Report) -> Table:
    table = Table(title=f"kvmosaic {report['version']}, pid {report['pid']}", show_header=False)
    table.add_row("objects", f"{report['objects']}, {decimal(report['object_bytes'])}")
    table.add_row("memory used", f"{decimal(report['used_bytes'])} of {decimal(report['capacity_bytes'])}")
    if report["usable_bytes"] < report["capacity_bytes"]:
        table.add_row("resident so far", decimal(report["usable_bytes"]))
    for name in ("leases", "reservations", "sessions", "quarantined"):
        table.add_row(name, str(report[name]))
    return table


def _models(report: Report) -> Table:
    table = Table("model", "chunk", "objects", "bytes", "lookups", "hits", title="models")
    for model in report["models"]:
        table.add_row(
            model["model"],
            str(model["chunk_tokens"]),
            str(model["objects"]),
            decimal(model["bytes"]),
            str(model["lookups"]),
            str(model["hits"]),
        )
    return table


def _engines(report: Report) -> Table:
    table = Table("engine", "model", "ranks", "state", "pids", title="engines")
    for engine in report["engines"]:
        table.add_row(
            engine["engine"],
            engine["model"],
            f"{engine['ranks']} of {engine['world']}",
            "ready" if engine["ready"] else engine["refusal"] or "attaching",
            " ".join(map(str, engine["pids"])),
        )
    return table
