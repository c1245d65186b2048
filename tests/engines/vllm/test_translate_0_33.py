"""Translation and models once more, with the sources of vLLM 0.33: its planners need no build for this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / ".cache/vllm-0.33.0"


@pytest.mark.slow
@pytest.mark.parametrize("file", ["test_translate.py", "test_models.py"])
def test_the_translation_holds_under_vllm_0_33(file: str) -> None:
    assert SOURCES.is_dir(), f"{SOURCES} is missing; run: make setup"
    path = os.pathsep.join([str(SOURCES), str(ROOT / "src")])
    command = [sys.executable, "-m", "pytest", "-x", str(Path(__file__).with_name(file))]
    environ = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
