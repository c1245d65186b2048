"""One server for all engine tests that do not break it: models of every kind share it, as on a real node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmosaic.testing.serving import ServerProcess
from tests.engine.processes import is_settled


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("server") / "server.sock", 1.0)
    yield server
    assert is_settled(server)
    server.close()
