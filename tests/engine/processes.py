"""A real vLLM engine in a process of its own, and how its answers are compared."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmosaic.testing import models
from kvmosaic.testing.serving import ServerProcess

HERE = Path(__file__).parent
CHECKPOINTS = HERE.parents[1] / ".cache" / "models"
START_TIMEOUT_S = 180.0
ROUNDING = 0.15
"""Runs that are cut into steps in different ways may differ by this much: the engine alone shows up to 0.1."""
VISIBLE = 0.3
"""Every negative control differs by at least this much."""


class EngineDied(Exception):
    """The engine process ended; the message is the end of its log."""


@dataclass(frozen=True)
class Answer:
    """What one request brought: greedy tokens, the log-probabilities of the whole vocabulary, tokens not computed."""

    tokens: list[int]
    logprobs: list[list[float]]
    local: int
    external: int
    finish: str


def difference(first: Answer, second: Answer) -> float:
    """The largest difference of two log-probabilities, up to and with the first token where the answers part."""
    largest = 0.0
    steps = zip(first.tokens, second.tokens, first.logprobs, second.logprobs, strict=True)
    for first_token, second_token, first_row, second_row in steps:
        largest = max(largest, *(abs(a - b) for a, b in zip(first_row, second_row, strict=True)))
        if first_token != second_token:
            break
    return largest


def largest_difference(first: Sequence[Answer], second: Sequence[Answer]) -> float:
    return max(difference(a, b) for a, b in zip(first, second, strict=True))


def is_settled(server: ServerProcess) -> bool:
    """No right to read or write the arena is left with anyone."""
    report = server.status()
    return report["leases"] == 0 and report["reservations"] == 0


def num_ready(server: ServerProcess) -> int:
    """How many engines can store and load now."""
    return sum(engine["ready"] for engine in server.status()["engines"])


class Engine:
    """A vLLM engine process; `server` is where its connector looks, None runs vLLM alone."""

    def __init__(self, model: str, folder: Path, server: Path | None, **options: Any) -> None:
        self.model = model
        self.window_tokens = models.RECIPES[model].window_tokens
        self._log = folder / f"engine-{model}.log"
        self._options = {
            "model": str(models.checkpoint(model, CHECKPOINTS)),
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 256,
            "max_logprobs": -1,
            "kv_cache_memory_bytes": 256 << 20,
            "enable_prefix_caching": True,
            **options,
        }
        if server is not None:
            # Patient, since a busy machine must not turn a hit that is asserted into a miss.
            patient = {"kvmosaic.required": True, "kvmosaic.lookup_timeout_ms": 5000}
            extra = {**self._options.pop("extra_config", patient), "kvmosaic.socket": str(server)}
            self._options["kv_transfer_config"] = {
                "kv_connector": "MosaicConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        self._salts = itertools.count()
        self._start()

    def run(self, *prompts: list[int], **request: Any) -> list[Answer]:
        return self._answers(self.call("run", prompts=prompts, **request))

    def run_cold(self, *prompts: list[int], **request: Any) -> list[Answer]:
        """Compute the prompts anew: with a salt that no one used before a prompt shares nothing with any other."""
        salts = [f"{os.getpid()}-{self.process.pid}-{next(self._salts)}" for _ in prompts]
        answers = self.run(*prompts, salts=salts, **request)
        assert not any(answer.local or answer.external for answer in answers)
        return answers

    def run_apart(self, *prompts: list[int], **request: Any) -> list[Answer]:
        """One after the other, each with the whole token budget of the engine."""
        return [self.run(prompt, **request)[0] for prompt in prompts]

    def drain(self, names: list[str]) -> list[Answer | None]:
        return [Answer(**answer) if answer else None for answer in self.call("drain", names=names)]

    def drop_local(self) -> None:
        """Empty vLLM's own prefix cache; what kvmosaic holds stays."""
        assert self.call("drop_local") is True

    def call(self, verb: str, timeout_s: float = 150.0, **arguments: Any) -> Any:
        self.send(verb, **arguments)
        return self.receive(timeout_s)

    def send(self, verb: str, **arguments: Any) -> None:
        self._lines.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self._lines.flush()

    def receive(self, timeout_s: float = 150.0) -> Any:
        self._link.settimeout(timeout_s)
        line = self._lines.readline()
        if not line:
            self.kill()
            raise EngineDied(self._last_lines())
        reply = json.loads(line)
        assert "error" not in reply, f"{reply['error']}\n{self._last_lines()}"
        return reply["answer"]

    def restart(self, **options: Any) -> None:
        self.close()
        self._options |= options
        self._start()

    def kill(self) -> None:
        self._unlink()
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """The end of the link is how the process knows that it shall end. A killed engine may be closed, too."""
        if self.process.returncode is not None:
            return
        self._unlink()
        try:
            assert self.process.wait(30) == 0, self._last_lines()
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def log(self) -> str:
        return self._log.read_text()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # Threads that wait for each other by spinning crawl as soon as anything else runs on the machine.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(HERE / "engine_main.py"), str(theirs.fileno()), json.dumps(self._options)]
        with theirs, self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, pass_fds=[theirs.fileno()]
            )
        self._link = ours
        self._lines = ours.makefile("rw")
        assert self.receive(START_TIMEOUT_S) == "ready"

    def _unlink(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._lines.close()
        self._link.close()

    def _answers(self, raw: list[dict[str, Any]]) -> list[Answer]:
        return [Answer(**answer) for answer in raw]

    def _last_lines(self) -> str:
        return "\n".join(self.log().splitlines()[-60:])


@contextlib.contextmanager
def running_engine(model: str, folder: Path, server: Path | None, **options: Any) -> Iterator[Engine]:
    engine = Engine(model, folder, server, **options)
    try:
        yield engine
    except BaseException:
        engine.kill()
        raise
    else:
        engine.close()
