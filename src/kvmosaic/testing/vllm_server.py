"""A real OpenAI-compatible vLLM server in a process of its own, asked over HTTP as any client would.

Owns the process and its log. Used by `kvmosaic demo`; imports no engine itself.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmosaic.errors import MosaicError

START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 120.0
NUM_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The answer to one prompt: seconds to the first token, and log-probabilities of its likeliest candidates."""

    seconds: float
    logprobs: dict[str, float]


class VllmServer:
    """Started at once, ready after wait_ready(). `environ` comes on top of what every such server needs."""

    def __init__(self, model: Path, connector: dict[str, Any], log: Path) -> None:  # Any: JSON values
        self._port = _free_port()
        self._log = log
        transfer = {"kv_connector": "MosaicConnector", "kv_role": "kv_both", "kv_connector_extra_config": connector}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "16"]
        command += ["--kv-cache-memory-bytes", str(256 << 20), "--kv-transfer-config", json.dumps(transfer)]
        environ = {
            # Threads that wait for each other by spinning crawl on a busy machine: one does, for models this small.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache exists only then
        }
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, env=environ, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def wait_ready(self) -> None:
        """Wait until it answers. MosaicError with the end of its log when it does not."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                last_lines = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
                raise MosaicError(f"vLLM did not start; the end of {self._log}:\n{last_lines}")
            time.sleep(0.2)

    def first_token(self, prompt: list[int]) -> FirstToken:
        """Compute the first token of an answer, greedily."""
        body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": NUM_LOGPROBS}
        # By id, since bytes that are no text by themselves all read alike.
        body["return_tokens_as_token_ids"] = True
        began = time.perf_counter()
        reply = json.loads(self._post("/v1/completions", body))
        seconds = time.perf_counter() - began
        return FirstToken(seconds, reply["choices"][0]["logprobs"]["top_logprobs"][0])

    def drop_own_cache(self) -> None:
        """Empty vLLM's prefix cache; kvmosaic's content stays."""
        self._post("/reset_prefix_cache", None)

    def drop_all_caches(self) -> None:
        """Empty vLLM's prefix cache and what kvmosaic holds of this model."""
        self._post("/reset_prefix_cache?reset_external=true", None)

    def num_external_tokens(self) -> int:
        """Prompt tokens that came from outside the engine since its start."""
        metrics = self._get("/metrics")
        found = re.findall(r"^vllm:external_prefix_cache_hits_total\{.*\} ([0-9.e+]+)$", metrics, re.MULTILINE)
        return sum(int(float(value)) for value in found)

    def kill(self) -> None:
        """SIGKILL for all its processes, as after a crash."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """End it in order, or by force after a while. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)
        self._process.wait()

    def _is_healthy(self) -> bool:
        try:
            self._get("/health")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self._url(path), timeout=REQUEST_TIMEOUT_S) as reply:
            return str(reply.read().decode())

    def _post(self, path: str, body: dict[str, Any] | None) -> str:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url(path), data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as reply:
            return str(reply.read().decode())

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}{path}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
