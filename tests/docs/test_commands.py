"""Every command block in README.md and docs/ is run, in its order, as a reader would run it.

`make` targets are only looked up, since they would run this test again. `vllm serve` is stood in for by the same API
server under its module name: a CPU build of vLLM has no `vllm` command that starts. $MODEL is a tiny model.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmosaic.testing.models import checkpoint
from kvmosaic.testing.serving import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```(?:bash|console|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
VLLM = f"""#!/bin/sh
shift
exec {sys.executable} -m vllm.entrypoints.openai.api_server --enforce-eager --max-model-len 2048 --model "$@"
"""


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


def is_make(block: str) -> bool:
    return all(line.startswith("make ") for line in block.splitlines())


class Shell:
    """A reader's terminal: own default socket, `vllm` and `kvmosaic` on the path, background jobs ended at last."""

    def __init__(self, folder: Path) -> None:
        (folder / "vllm").write_text(VLLM)
        (folder / "vllm").chmod(0o755)
        self._jobs = folder / "jobs"
        self.environ = {
            **os.environ,
            "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "KVMOSAIC_SOCKET": str(folder / "server.sock"),
            "MODEL": str(checkpoint("llama")),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }

    def run(self, block: str) -> None:
        done = subprocess.run(
            ["bash", "-eu", "-c", f"{block}\njobs -p >>{self._jobs}"],
            env=self.environ,
            capture_output=not block.rstrip().endswith("&"),
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        if "kvmosaic server" in block:
            wait_until(lambda: self._succeeds("kvmosaic status"))
        if "vllm serve" in block:
            wait_until(lambda: answers("http://localhost:8000/health"), 120)

    def _succeeds(self, command: str) -> bool:
        done = subprocess.run(["bash", "-c", command], env=self.environ, capture_output=True, check=False)
        return done.returncode == 0

    def close(self) -> None:
        for job in reversed(self._jobs.read_text().split() if self._jobs.exists() else []):
            pid = int(job)
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists() or is_zombie(pid), 30)


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    one = Shell(tmp_path)
    yield one
    one.close()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_every_command_block_runs(page: Path, shell: Shell) -> None:
    for block in blocks(page):
        if not is_make(block):
            shell.run(block)


def test_every_make_target_that_is_named_exists() -> None:
    named = {name for page in PAGES for name in re.findall(r"\bmake ([a-z][a-z-]*)", page.read_text())}
    assert {"demo", "test", "lint", "bench", "setup"} <= named
    for name in named:
        done = subprocess.run(["make", "-n", name], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_path_in_the_readme_exists() -> None:
    table = re.findall(r"^\|[^|]*\| (`.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    named = {name for row in table for name in re.findall(r"`([a-z_/]+\.py|[a-z_]+/)`", row)}
    package = ROOT / "src/kvmosaic"
    assert named
    for name in named:
        assert (package / name).exists() or list(package.glob(f"**/{name}")), name
