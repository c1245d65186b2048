"""A real OpenAI-compatible vLLM server, its engine in a process of its own, used as a user does: over HTTP and CLI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmosaic.testing.models import checkpoint, prompt
from kvmosaic.testing.serving import ServerProcess, wait_until
from kvmosaic.testing.vllm_server import FirstToken, VllmServer
from tests.engine.processes import CHECKPOINTS, ROUNDING

LENGTH = 2500
PROMISED = 2304
KVMOSAIC = Path(sys.executable).with_name("kvmosaic")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("http") / "server.sock")
    yield server
    server.close()


@pytest.fixture(scope="module", params=["gpt-oss", "qwen3-next"])
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def vllm(model: str, server: ServerProcess) -> Iterator[VllmServer]:
    connector = {
        "kvmosaic.socket": str(server.socket),
        "kvmosaic.required": True,
        "kvmosaic.model_tag": model,
        "kvmosaic.lookup_timeout_ms": 5000,
    }
    vllm = VllmServer(checkpoint(model, CHECKPOINTS), connector, server.socket.with_name("vllm.log"))
    try:
        vllm.wait_ready()
        yield vllm
    finally:
        vllm.close()


def status(server: ServerProcess) -> dict[str, Any]:
    command = [KVMOSAIC, "status", "--socket", server.socket, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def num_objects(server: ServerProcess, model: str) -> int:
    return sum(report["objects"] for report in status(server)["models"] if report["model"] == model)


def served(vllm: VllmServer, seed: int) -> tuple[int, FirstToken]:
    """How many tokens of the prompt came from kvmosaic, and the answer, with vLLM's own cache empty."""
    vllm.drop_own_cache()
    before = vllm.num_external_tokens()
    answer = vllm.first_token(prompt(LENGTH, seed=seed))
    return vllm.num_external_tokens() - before, answer


def test_dropping_vllms_cache_over_http_keeps_ours(vllm: VllmServer, server: ServerProcess) -> None:
    cold_tokens, cold = served(vllm, seed=1)
    # The engine is idle by now: what its last step stored must be committed all the same.
    wait_until(lambda: status(server)["reservations"] == 0, 5.0)
    warm_tokens, warm = served(vllm, seed=1)
    assert (cold_tokens, warm_tokens) == (0, PROMISED)
    assert (
        max(abs(cold.logprobs[token] - warm.logprobs.get(token, -9.0)) for token in list(cold.logprobs)[:5]) < ROUNDING
    )
    wait_until(lambda: status(server)["leases"] == 0, 5.0)


def test_reset_external_over_http_empties_the_model(vllm: VllmServer, server: ServerProcess, model: str) -> None:
    served(vllm, seed=2)
    others = status(server)["objects"] - num_objects(server, model)
    assert num_objects(server, model) > 0
    vllm.drop_all_caches()
    assert num_objects(server, model) == 0
    assert status(server)["objects"] == others
    assert served(vllm, seed=2)[0] == 0
    assert served(vllm, seed=2)[0] == PROMISED


def test_kvmosaic_clear_makes_the_engine_compute_and_store_anew(
    vllm: VllmServer, server: ServerProcess, model: str
) -> None:
    served(vllm, seed=3)
    assert served(vllm, seed=3)[0] == PROMISED
    command = [KVMOSAIC, "clear", "--socket", server.socket, "--model", model]
    subprocess.run(command, capture_output=True, timeout=30, check=True)
    assert num_objects(server, model) == 0
    assert served(vllm, seed=3)[0] == 0
    assert served(vllm, seed=3)[0] == PROMISED


def test_a_killed_vllm_leaves_its_objects_and_nothing_else(vllm: VllmServer, server: ServerProcess) -> None:
    objects = status(server)["objects"]
    assert objects > 0
    vllm.kill()
    wait_until(lambda: status(server)["engines"] == [], 5.0)
    after = status(server)
    assert (after["objects"], after["leases"], after["reservations"], after["quarantined"]) == (objects, 0, 0, 0)
    assert not [name for name in os.listdir("/dev/shm") if "mosaic" in name]
