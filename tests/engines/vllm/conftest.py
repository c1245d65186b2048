from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmosaic.testing.serving import ServerProcess


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path / "server.sock")
    yield process
    process.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Builds modelled engines on a socket of this test, and closes them."""
    from kvmosaic.testing.geometries import GEOMETRIES
    from kvmosaic.testing.modelled import ModelledEngine
    from kvmosaic.testing.planned import Settings

    built: list[ModelledEngine] = []

    def build(model: str, **options: Any) -> ModelledEngine:
        connector = {
            "kvmosaic.socket": str(tmp_path / "server.sock"),
            "kvmosaic.model_tag": model,
            "kvmosaic.lookup_timeout_ms": 2000,  # a busy machine must not turn a hit into a miss
        }
        connector |= options.pop("connector", {})
        folder = tmp_path / model.replace(" ", "-")
        built.append(ModelledEngine(folder, GEOMETRIES[model], connector, Settings(**options)))
        return built[-1]

    yield build
    for each in built:
        each.close()
