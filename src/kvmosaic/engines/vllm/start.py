"""Starts the scheduler half: a server if the user asked for one, the session, the wait, the refusal.

Only here may the cache keep an engine from starting: when the server refuses its model, or is required and absent.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from typing import Any

from kvmosaic.client import Connection, SchedulerClient, SchedulerSession, State
from kvmosaic.engines.vllm.options import Options
from kvmosaic.engines.vllm.scheduler import SchedulerHalf
from kvmosaic.engines.vllm.translate import engine_key
from kvmosaic.errors import Refused, ServerLost

logger = logging.getLogger(__name__)

SETTLE_S = 5.0
"""How long a starting engine waits for a server that listens."""

REQUIRED_S = 60.0
"""How long it waits for one that is required."""

AUTOSTART_S = 10.0
"""How long it waits for one that it started itself to listen."""

LINGER_S = 60
"""How long a server started by an engine outlives its last engine."""


def start_scheduler(options: Options, vllm_config: Any, kv_cache_config: Any) -> SchedulerHalf:
    """Build the half; raise Refused when this engine must not start."""
    if options.autostart is not None and not listens(options):
        autostart(options, options.autostart)
    session = SchedulerSession(options.socket, engine_key(vllm_config))
    session.start()
    state = session.wait_settled(SETTLE_S)
    if options.required and state is not State.REFUSED and not session.wait_ready(REQUIRED_S):
        session.close()
        raise Refused(
            f"kvmosaic.required is true, but no server was ready on {options.socket} within {REQUIRED_S:.0f} s; "
            f"start one with: kvmosaic server --l1-size-gb SIZE --socket {options.socket}"
        )
    refusal = session.refusal
    if refusal is not None:
        session.close()
        raise Refused(refusal)
    if state is not State.READY:
        logger.warning(
            "kvmosaic is %s on %s; the engine runs without it until it is ready", state.value, options.socket
        )
    client = SchedulerClient(session, budget_s=options.lookup_timeout_ms / 1000)
    half = SchedulerHalf(client, session, vllm_config, kv_cache_config)
    half.greet()
    return half


def listens(options: Options) -> bool:
    """Whether a server accepts connections on the socket."""
    try:
        Connection.connect(options.socket).close()
    except ServerLost:
        return False
    return True


def autostart(options: Options, size_gb: float) -> None:
    """Start a server that outlives this engine and ends some time after its last one; two starters are harmless.

    A shell in between makes it nobody's child, so it leaves no zombie in a long-lived engine.
    """
    command = [sys.executable, "-m", "kvmosaic", "server", "--l1-size-gb", f"{size_gb:g}", "--http", "off"]
    command += ["--socket", str(options.socket), "--exit-when-idle-s", str(LINGER_S)]
    log = options.socket.with_suffix(".log")
    detach = ["sh", "-c", '"$@" </dev/null >>"$0" 2>&1 &', str(log)]
    try:
        options.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        subprocess.run([*detach, *command], check=True, start_new_session=True)
    except (OSError, subprocess.SubprocessError) as error:
        logger.error("kvmosaic.autostart: no server could be started: %s", error)
        return
    deadline = time.monotonic() + AUTOSTART_S
    while not listens(options):
        if time.monotonic() > deadline:
            logger.error("kvmosaic.autostart: no server on %s after %g s; see %s", options.socket, AUTOSTART_S, log)
            return
        time.sleep(0.02)
    logger.info("kvmosaic.autostart: a server of %g GB listens on %s; its log is %s", size_gb, options.socket, log)
