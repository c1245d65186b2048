"""Unpack the Python sources of a vLLM wheel, to check the connector against a version that no CPU build exists of.

python scripts/fetch_vllm_sources.py 0.33.0 .cache/vllm-0.33.0
"""

import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def main(version: str, target: Path) -> None:
    """Do nothing when the target is complete; otherwise fill it or leave nothing."""
    if target.is_dir():
        return
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
        command += ["--platform", f"manylinux_2_28_{platform.machine()}", "--dest", folder, f"vllm=={version}"]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("vllm-*.whl")
        unpacked = Path(folder) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name.endswith((".py", "METADATA", "entry_points.txt"))]
            archive.extractall(unpacked, wanted)
        unpacked.rename(target)


if __name__ == "__main__":
    Path(sys.argv[2]).parent.mkdir(parents=True, exist_ok=True)
    main(sys.argv[1], Path(sys.argv[2]))
