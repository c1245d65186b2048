from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvmosaic.testing import models

CHECKPOINTS = Path(__file__).parents[2] / ".cache" / "models"


@pytest.mark.slow
def test_two_processes_that_want_the_same_checkpoint_get_one_and_leave_nothing_else(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from kvmosaic.testing import models;"
        f"models.checkpoint('llama', Path({str(tmp_path)!r}))"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    (folder,) = tmp_path.iterdir()
    assert folder == models.checkpoint("llama", tmp_path)


@pytest.mark.slow
def test_a_checkpoint_that_is_there_is_found_without_torch(tmp_path: Path) -> None:
    known = models.checkpoint("gemma3", CHECKPOINTS)
    code = (
        "import sys; from pathlib import Path; from kvmosaic.testing import models;"
        f"assert models.checkpoint('gemma3', Path({str(CHECKPOINTS)!r})) == Path({str(known)!r});"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_prompts_are_bytes_and_one_seed_is_one_text() -> None:
    long, short, other = models.prompt(500, seed=1), models.prompt(100, seed=1), models.prompt(100, seed=2)
    assert long[:100] == short
    assert all(models.prompt(length, seed=1) == long[:length] for length in range(20))
    assert short[:3] != other[:3]
    assert set(long) <= set(range(models.NUM_BYTES))
