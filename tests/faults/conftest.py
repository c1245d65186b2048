from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.processes import ServerProcess


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "server.sock") as process:
        process.wait_populated()
        yield process
