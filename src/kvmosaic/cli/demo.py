"""`kvmosaic demo`: the main job on a real vLLM with real hybrid models, in two or three minutes and without a GPU.

For each model: prompts cold, vLLM's own cache dropped, the prompts again, vLLM killed and started anew, the prompts
once more. Ends with one table, and with exit status 1 if anything in it is off.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvmosaic.cli.endpoint import ask
from kvmosaic.errors import MosaicError
from kvmosaic.protocol.messages import Status, StatusReport
from kvmosaic.testing import models
from kvmosaic.testing.vllm_server import FirstToken, VllmServer

MODELS = ("qwen3-next", "gemma3")
PROMPT_TOKENS = 3000
NUM_PROMPTS = 3
TOLERANCE = 0.15
"""vLLM itself differs by up to 0.1 between two ways of cutting a prompt into steps; a wrong page shows as 0.3."""
PATIENCE_MS = 2000
"""The demo may share two cores with anything; a slow answer must not pass for a miss."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one model; `served` are tokens from kvmosaic, warm and after the restart."""

    name: str
    geometry: dict[str, Any]  # Any: the model's part of the status report
    seconds: tuple[float, float, float]
    served: tuple[int, int]
    expected: int
    difference: float

    @property
    def faults(self) -> list[str]:
        """What is off; empty when all is well."""
        found = []
        if min(self.served) < self.expected:
            found.append(f"served {min(self.served)} of {self.expected} tokens")
        if self.difference > TOLERANCE:
            found.append(f"log-probabilities differ by {self.difference:.2f}")
        return found


def demo(
    folder: Annotated[Path, typer.Option("--models", help="Where the tiny models are kept.")] = models.default_folder(),
) -> None:
    """Show the main job: a real vLLM with hybrid models, cold, warm and restarted."""
    if importlib.util.find_spec("vllm") is None:
        raise MosaicError("the demo needs vLLM; install it with: pip install 'kvmosaic[vllm]'")
    console = Console()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="kvmosaic-demo-") as scratch, console.status("starting") as progress:
        socket = Path(scratch) / "server.sock"
        with _server(socket):
            for name in MODELS:

                def say(what: str, model: str = name) -> None:
                    progress.update(f"{model}: {what}")

                outcomes.append(_run(name, folder, socket, say))
    console.print(_table(outcomes))
    if any(outcome.faults for outcome in outcomes):
        raise typer.Exit(1)


@contextmanager
def _server(socket: Path) -> Iterator[None]:
    command = [
        sys.executable,
        "-m",
        "kvmosaic",
        "server",
        "--l1-size-gb",
        "1",
        "--http",
        "off",
        "--socket",
        str(socket),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _run(name: str, folder: Path, socket: Path, say: Say) -> Outcome:
    say("drawing random weights")
    model = models.checkpoint(name, folder)
    prompts = [models.prompt(PROMPT_TOKENS + 100 * number, seed=number) for number in range(NUM_PROMPTS)]
    with _engine(name, model, socket, say) as engine:
        say("computing the prompts")
        cold = [engine.first_token(prompt) for prompt in prompts]
        engine.drop_own_cache()
        say("asking again, vLLM's own cache is empty")
        warm = [engine.first_token(prompt) for prompt in prompts]
        served_warm = engine.num_external_tokens()
        say("killing vLLM")
        engine.kill()
    with _engine(name, model, socket, say) as engine:
        say("asking the new vLLM")
        restarted = [engine.first_token(prompt) for prompt in prompts]
        served_restarted = engine.num_external_tokens()
    geometry = _geometry(socket, name)
    chunk = geometry["chunk_tokens"]
    return Outcome(
        name=name,
        geometry=geometry,
        seconds=(_median_s(cold), _median_s(warm), _median_s(restarted)),
        served=(served_warm, served_restarted),
        expected=sum((len(prompt) - 1) // chunk * chunk for prompt in prompts),
        difference=max(_difference(cold, warm), _difference(cold, restarted)),
    )


@contextmanager
def _engine(name: str, model: Path, socket: Path, say: Say) -> Iterator[VllmServer]:
    """A vLLM that has answered once, so that no first-time work is in the times."""
    say("starting vLLM")
    connector = {
        "kvmosaic.socket": str(socket),
        "kvmosaic.model_tag": name,
        "kvmosaic.required": True,
        "kvmosaic.lookup_timeout_ms": PATIENCE_MS,
    }
    engine = VllmServer(model, connector, socket.with_name(f"{name}.log"))
    try:
        engine.wait_ready()
        engine.first_token(models.prompt(50, seed=99))
        yield engine
    finally:
        engine.close()


def _geometry(socket: Path, name: str) -> dict[str, Any]:
    reply = ask(socket, Status(0))
    assert isinstance(reply, StatusReport)
    model: dict[str, Any] = next(model for model in reply.report["models"] if model["model"] == name)
    return model


def _median_s(answers: list[FirstToken]) -> float:
    return statistics.median(answer.seconds for answer in answers)


def _difference(first: list[FirstToken], second: list[FirstToken]) -> float:
    """The largest difference between log-probabilities that both answers report; a missing top token is infinite."""
    differences = [0.0]
    for one, other in zip(first, second, strict=True):
        both = one.logprobs.keys() & other.logprobs.keys()
        likeliest = max(one.logprobs, key=lambda token: one.logprobs[token])
        differences += [abs(one.logprobs[token] - other.logprobs[token]) for token in both]
        differences.append(0.0 if likeliest in both else float("inf"))
    return max(differences)


def _table(outcomes: list[Outcome]) -> Table:
    """One column a model, so that it fits a terminal of 80 characters."""
    table = Table(title=f"{NUM_PROMPTS} prompts of {PROMPT_TOKENS} tokens and more; median time to first token")
    table.add_column("model")
    for outcome in outcomes:
        table.add_column(outcome.name)
    columns = [_column(outcome) for outcome in outcomes]
    for row in columns[0]:
        table.add_row(row, *(column[row] for column in columns))
    return table


def _column(outcome: Outcome) -> dict[str, str]:
    geometry = outcome.geometry
    kinds = [group["kind"] for group in geometry["groups"]]
    blocks = [group["block_tokens"] for group in geometry["groups"] if group["kind"] == "state"]
    cold, warm, restarted = (f"{seconds * 1000:.0f} ms" for seconds in outcome.seconds)
    return {
        "groups": " + ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)),
        "N": str(blocks[0]) if blocks else "-",
        "C": str(geometry["chunk_tokens"]),
        "object groups": ", ".join(group["kind"] for group in geometry["object_groups"]),
        "cold": cold,
        "warm": warm,
        "after a restart of vLLM": restarted,
        "tokens served by kvmosaic, warm": f"{outcome.served[0]} of {outcome.expected}",
        "tokens served by kvmosaic, restarted": f"{outcome.served[1]} of {outcome.expected}",
        "largest log-probability difference": f"{outcome.difference:.3f}",
        "verdict": "; ".join(outcome.faults) or "right",
    }
