"""What a user gets from the package alone: a server without torch and vLLM, and the connector's entry point."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvmosaic.testing.serving import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a virtual environment that holds kvmosaic and what it declares to need, nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(folder / "bin/python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check", str(ROOT)]
    subprocess.run(install, check=True)
    return folder / "bin"


@pytest.mark.parametrize("module", ["torch", "vllm", "transformers"])
def test_the_package_brings_no_engine(module: str, bare: Path) -> None:
    done = subprocess.run([bare / "python", "-c", f"import {module}"], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in done.stderr


def test_a_server_runs_without_an_engine(bare: Path, tmp_path: Path) -> None:
    socket = str(tmp_path / "server.sock")
    command = [bare / "kvmosaic", "server", "--l1-size-gb", "0.0625", "--http", "off", "--socket", socket]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    status = [bare / "kvmosaic", "status", "--socket", socket, "--json"]
    try:
        wait_until(lambda: subprocess.run(status, capture_output=True, check=False).returncode == 0, 20)
        report = json.loads(subprocess.run(status, capture_output=True, check=True).stdout)
        numbers = {"objects", "object_bytes", "capacity_bytes", "leases", "reservations", "sessions"}
        assert numbers | {"models"} <= set(report)
    finally:
        server.terminate()
        assert server.wait(10) == 0


def test_vllm_finds_the_connector_by_its_bare_name(bare: Path) -> None:
    code = "import importlib.metadata as m; print(*(p.value for p in m.entry_points(group='vllm.general_plugins')))"
    done = subprocess.run([bare / "python", "-c", code], capture_output=True, text=True, check=True)
    assert "kvmosaic.engines.vllm.plugin:register" in done.stdout
