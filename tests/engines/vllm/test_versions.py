"""The connector against the sources of every vLLM it serves: names, signatures, fields.

Sources are parsed, not imported, so a version without a CPU build is checked like the installed one.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OURS = ROOT / "src/kvmosaic/engines/vllm"
OTHER = ROOT / ".cache/vllm-0.33.0"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


@pytest.fixture(params=["installed", "0.33.0"])
def sources(request: pytest.FixtureRequest) -> Path:
    if request.param == "installed":
        return installed()
    assert OTHER.is_dir(), f"{OTHER} is missing; run: make setup"
    return OTHER


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_path(sources: Path, module: str) -> Path:
    path = sources.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def top_level_names(module: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def class_of(sources: Path, module: str, name: str) -> ast.ClassDef:
    for node in parse(module_path(sources, module)).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"{module} has no class {name}")


def methods_of(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def unguarded_imports() -> list[tuple[str, str, str]]:
    """(our file, their module, name) of every import from vLLM that is not a version shim in a `try`."""
    found = []
    for path in sorted(OURS.glob("*.py")):
        tree = parse(path)
        guarded = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
        for node in ast.walk(tree):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if isinstance(node, ast.ImportFrom) and module.split(".")[0] == "vllm" and id(node) not in guarded:
                found += [(path.name, module, alias.name) for alias in node.names]
    return found


def test_every_imported_name_exists(sources: Path) -> None:
    imports = unguarded_imports()
    assert imports
    for file, module, name in imports:
        path = module_path(sources, module)
        assert path.is_file(), f"{file} imports {module}"
        submodule = module_path(sources, f"{module}.{name}").is_file()
        assert submodule or name in top_level_names(parse(path)), f"{file} imports {name} from {module}"


def test_every_overridden_method_takes_what_the_base_passes(sources: Path) -> None:
    base = methods_of(class_of(sources, BASE, "KVConnectorBase_V1"))
    base |= methods_of(class_of(sources, BASE, "SupportsHMA"))
    ours = methods_of(class_of(ROOT / "src", "kvmosaic.engines.vllm.connector", "MosaicConnector"))
    shared = set(base) & set(ours)
    assert {
        "get_num_new_matched_tokens",
        "build_connector_meta",
        "wait_for_save",
        "request_finished_all_groups",
    } <= shared
    for name in shared:
        theirs, mine = (
            [arg.arg for arg in method.args.args if arg.arg not in ("self", "cls")]
            for method in (base[name], ours[name])
        )
        assert len(theirs) == len(mine), f"{name}: base has {theirs}, ours {mine}"
        if base[name].args.kwarg:
            assert ours[name].args.kwarg, f"{name} must take keyword arguments"


def test_every_abstract_method_is_there(sources: Path) -> None:
    ours = methods_of(class_of(ROOT / "src", "kvmosaic.engines.vllm.connector", "MosaicConnector"))
    for owner in ("KVConnectorBase_V1", "SupportsHMA"):
        for name, method in methods_of(class_of(sources, BASE, owner)).items():
            if any(getattr(decorator, "id", "") == "abstractmethod" for decorator in method.decorator_list):
                assert name in ours, f"{name} is abstract"


FIELDS = {
    ("vllm.v1.core.sched.output", "SchedulerOutput"): {
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "kv_connector_block_state",
    },
    ("vllm.v1.core.sched.output", "KVConnectorBlockState"): {"boundary_state_offloads", "get_block_ids"},
    ("vllm.v1.outputs", "KVConnectorOutput"): {"finished_recving", "failed_recving", "kv_connector_worker_meta"},
    ("vllm.v1.request", "Request"): {
        "request_id",
        "num_computed_tokens",
        "block_hashes",
        "lora_request",
        "skip_reading_prefix_cache",
        "shared_prefix_boundary",
    },
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): {
        "num_blocks",
        "kv_cache_tensors",
        "kv_cache_groups",
        "hash_block_size",
        "kv_cache_layout",
    },
    ("vllm.v1.kv_cache_interface", "KVCacheTensor"): {"offset", "layer_stride", "block_stride", "layers"},
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"): {"get_block_ids"},
    (BASE, "KVConnectorTransferResults"): {"finished_recving", "failed_recving"},
}


@pytest.mark.parametrize(
    ("owner", "names"), FIELDS.items(), ids=lambda value: value[-1] if isinstance(value, tuple) else ""
)
def test_every_field_that_is_read_exists(sources: Path, owner: tuple[str, str], names: set[str]) -> None:
    node = class_of(sources, *owner)
    fields = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    attributes = {
        target.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Assign | ast.AnnAssign)
        for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
        if isinstance(target, ast.Attribute)
    }
    assert names <= fields | attributes | set(methods_of(node))


@pytest.mark.slow
def test_the_connector_imports_under_both(sources: Path) -> None:
    code = (
        "import vllm.distributed.kv_transfer.kv_connector.v1.base as base\n"
        "from kvmosaic.engines.vllm.connector import MosaicConnector\n"
        "assert not MosaicConnector.__abstractmethods__\n"
        f"assert base.__file__.startswith({str(sources)!r}), base.__file__\n"
    )
    path = os.pathsep.join([str(sources), str(ROOT / "src")])
    environ = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
