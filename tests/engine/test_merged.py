"""`--no-separate-object-groups`: one object holds every group of a chunk; served alike, refused where it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmosaic.testing.models import prompt
from kvmosaic.testing.serving import ServerProcess
from tests.engine.processes import Engine, EngineDied, difference, is_settled, running_engine

CHUNK = 256


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("merged") / "server.sock", 0.25, "--no-separate-object-groups")
    yield server
    assert is_settled(server)
    server.close()


@pytest.mark.parametrize("model", ["gemma3", "qwen3-next"])
def test_a_hybrid_is_served_from_one_object_group(server: ServerProcess, tmp_path: Path, model: str) -> None:
    with running_engine(model, tmp_path, server.socket, max_num_batched_tokens=CHUNK) as engine:
        for length in (CHUNK + 1, 2 * CHUNK, 1500, 2700):
            (cold,) = engine.run(prompt(length, seed=length))
            engine.drop_local()
            (warm,) = engine.run(prompt(length, seed=length))
            assert (cold.external, warm.external) == (0, (length - 1) // CHUNK * CHUNK)
            assert difference(warm, cold) == 0.0
        assert engine.call("state")["faults"] == {}
    (served,) = [report for report in server.status()["models"] if model in report["model"]]
    assert [group["kind"] for group in served["object_groups"]] == ["full"]


def test_a_budget_that_would_leave_chunks_without_a_state_is_refused_with_the_fix(
    server: ServerProcess, tmp_path: Path
) -> None:
    with pytest.raises(EngineDied) as refused:
        Engine("qwen3-next", tmp_path, server.socket, max_num_batched_tokens=2 * CHUNK)
    assert "--max-num-batched-tokens 256" in str(refused.value)
    assert "--max-num-batched-tokens 256" in server.log()


def test_a_chunk_size_that_no_block_fits_is_refused_with_the_nearest_ones(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "server.sock", 0.25, "--chunk-size", "300")
    try:
        with pytest.raises(EngineDied) as refused:
            Engine("llama", tmp_path, server.socket)
        for text in (str(refused.value), server.log()):
            assert "--chunk-size" in text
            assert "256" in text
            assert "384" in text
    finally:
        server.close()
