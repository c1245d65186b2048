"""The namespace of an engine: whatever makes its bytes or its digests incomparable gives another one.

One thing is changed at a time, from an engine that two processes agree about.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvmosaic.engines.vllm import identity
from kvmosaic.engines.vllm.adapters import Adapters
from kvmosaic.engines.vllm.options import Options
from tests.engines.vllm.planning import (
    MODELS,
    OPTIONS,
    Model,
    Plan,
    compose_all,
    full,
    plan_model,
    speculate,
    window,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def set_config(name: str, value: Any) -> Callable[[Plan], None]:
    def change(plan: Plan) -> None:
        owner: Any = plan.vllm_config
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)

    return change


def other_backend(plan: Plan) -> None:
    class Layer:
        isa = "amx"

    plan.vllm_config.compilation_config.static_forward_context["f0"] = Layer()


def other_class(plan: Plan) -> None:
    class FlashLayer:
        isa = "-"

        @staticmethod
        def get_attn_backend() -> Any:
            return SimpleNamespace(get_name=lambda: "FLASH_ATTN")

    plan.vllm_config.compilation_config.static_forward_context["f0"] = FlashLayer()


def images(**fields: Any) -> Callable[[Plan], None]:
    return set_config("model_config.multimodal_config", SimpleNamespace(**fields))


def other_spec(**fields: Any) -> Callable[[Plan], None]:
    def change(plan: Plan) -> None:
        for config in plan.workers:
            group = config.kv_cache_groups[0]
            group.kv_cache_spec = replace(group.kv_cache_spec, **fields)

    return change


def other_layer_names(plan: Plan) -> None:
    plan.workers[0].kv_cache_groups[0].layer_names.append("another")


CHANGES: dict[str, Callable[[Plan], None]] = {
    "rotary base": set_config("model_config.hf_config.rope_theta", 77.0),
    "rotary scaling": set_config("model_config.hf_config.rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    "configuration override": set_config("model_config.hf_config.rms_norm_eps", 1e-3),
    "dtype": set_config("model_config.dtype", torch.float16),
    "quantization": set_config("model_config.quantization", "fp8"),
    "arguments of the quantization": set_config("model_config.quantization_config", {"linear": "fp8"}),
    "model class": set_config("model_config.model_class_overrides", {"LlamaForCausalLM": "own:Llama"}),
    "cache dtype": set_config("cache_config.cache_dtype", "fp8"),
    "hash algorithm": set_config("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    "tensor parallel": set_config("parallel_config.tensor_parallel_size", 2),
    "pipeline parallel": set_config("parallel_config.pipeline_parallel_size", 2),
    "adapters": set_config("lora_config", object()),
    "image processing": images(mm_processor_kwargs={"min_pixels": 1}),
    "image decoding": images(media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}}),
    "video pruning": images(video_pruning_rate=0.5),
    "precision of the image encoder": images(mm_encoder_attn_dtype="fp8"),
    "packing": other_backend,
    "page format": other_spec(head_size=64, head_size_v=192),
    "data type of pages": other_spec(dtype=torch.float16),
    "layer names": other_layer_names,
    "backend": other_class,
    "layout": lambda plan: [setattr(each, "kv_cache_layout", "LBNHC") for each in (*plan.workers, plan.scheduler)],
    "hash block": lambda plan: [setattr(each, "hash_block_size", 8) for each in (*plan.workers, plan.scheduler)],
    "speculation": lambda plan: speculate(plan, {0}),
    "speculation without draft layers": lambda plan: speculate(plan, {0}, drop=False, method="ngram"),
    "vLLM's minor version": lambda plan: None,
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_the_bytes_changes_the_namespace(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_model(MODELS["Llama"], folder)
    before = compose_all(plan).namespace
    assert compose_all(plan_model(MODELS["Llama"], folder)).namespace == before
    CHANGES[what](plan)
    if what == "vLLM's minor version":
        monkeypatch.setattr(identity, "__version_tuple__", (0, 99, 0))
    assert compose_all(plan).namespace != before


def test_weights_that_are_no_files_here_are_shared_with_nobody(folder: Path) -> None:
    plans = [plan_model(MODELS["Llama"], folder) for _ in range(2)]
    (folder / "model.safetensors").unlink()
    first, second = (compose_all(plan).namespace for plan in plans)
    assert first != second
    assert len({compose_all(plan, replace(OPTIONS, model_tag="m")).namespace for plan in plans}) == 1


def test_the_layout_is_part_of_the_namespace(folder: Path) -> None:
    names = [name for name in MODELS if name.startswith("Llama")]
    assert len({compose_all(plan_model(MODELS[name], folder)).namespace for name in names}) == len(names)


def test_the_number_of_blocks_is_not(folder: Path) -> None:
    for name in ("DSA", "Llama, heads outside of blocks", "Qwen3-Next"):
        plans = [plan_model(replace(MODELS[name], num_blocks=number), folder) for number in (32, 48)]
        assert len({plan.workers[0].num_blocks for plan in plans}) == 2
        assert len({compose_all(plan).namespace for plan in plans}) == 1


def test_a_hash_seed_of_the_user_changes_the_namespace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_model(MODELS["Llama"], folder)
    before = compose_all(plan).namespace
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert compose_all(plan).namespace != before


def test_a_random_hash_seed_keeps_the_namespace_to_its_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    first, second = (plan_model(MODELS["Llama"], folder) for _ in range(2))
    for plan in (first, second):
        plan.vllm_config.cache_config.prefix_caching_hash_algo = "xxhash"
    assert compose_all(first).namespace == compose_all(first).namespace
    assert compose_all(first).namespace != compose_all(second).namespace


def test_weights_are_told_apart_by_their_files(tmp_path: Path) -> None:
    def namespace(options: Options = OPTIONS) -> bytes:
        return compose_all(plan_model(MODELS["Llama"], tmp_path), options).namespace

    none = namespace()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    first = namespace()
    assert len({none, first, namespace()}) == 2
    weights.write_bytes(b"two")
    assert namespace() != first
    assert namespace(replace(OPTIONS, weights_epoch="1")) != namespace()
    tagged = namespace(replace(OPTIONS, model_tag="mine"))
    weights.write_bytes(b"three")
    assert namespace(replace(OPTIONS, model_tag="mine")) == tagged


def test_a_tag_names_the_model_wherever_it_lies(tmp_path: Path) -> None:
    tagged = replace(OPTIONS, model_tag="mine")
    first, second = (compose_all(plan_model(MODELS["Llama"], tmp_path / name), tagged) for name in "ab")
    assert first.namespace == second.namespace
    assert first.model == "mine"
    assert json.loads((tmp_path / "a" / "config.json").read_text())["model_type"] == "llama"


def test_every_change_gives_a_namespace_of_its_own(folder: Path) -> None:
    """No two of them may be mistaken for each other either."""
    found = []
    for what in CHANGES.keys() - {"vLLM's minor version"}:
        plan = plan_model(MODELS["Llama"], folder)
        CHANGES[what](plan)
        found.append(compose_all(plan).namespace)
    assert len(set(found)) == len(found)


def test_an_option_of_a_speculating_engine_changes_the_namespace(folder: Path) -> None:
    found = set()
    for change in ({}, {"num_speculative_tokens": 5}, {"method": "mtp"}, {"drop": False}):
        plan = plan_model(MODELS["Llama"], folder)
        speculate(plan, {0}, **change)
        found.add(compose_all(plan).namespace)
    assert len(found) == 4


def test_a_window_of_another_size_is_another_namespace(folder: Path) -> None:
    """Also where chunks, kept blocks and page bytes are the same."""
    found = set()
    for tokens in (64, 63):
        plan = plan_model(Model(({"f0": full(), "w0": window(tokens)},)), folder)
        found.add(compose_all(plan).namespace)
    assert len(found) == 2


def test_ranks_and_stages_are_part_of_the_namespace(folder: Path) -> None:
    layers = {"f0": full(), "f1": full()}
    models = [
        Model((layers,)),
        Model((layers, layers), tensor_parallel=2),
        Model(({"f0": full()}, {"f1": full()})),
    ]
    assert len({compose_all(plan_model(model, folder)).namespace for model in models}) == 3


def test_the_chunk_size_and_the_mode_of_object_groups_are_part_of_the_namespace(folder: Path) -> None:
    plan = plan_model(MODELS["Gemma 3"], folder)
    found = {
        compose_all(plan, chunk_tokens=chunk, separate=separate).namespace
        for chunk in (None, 512)
        for separate in (True, False)
    }
    assert len(found) == 4


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_whose_files_are_saved_again_has_other_digests(tmp_path: Path, file: str) -> None:
    """Seen by an engine that starts anew: the same number of bytes, under the same name and path."""
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / name).write_bytes(b"one")
    lora = SimpleNamespace(lora_path=str(tmp_path), lora_name="a", lora_int_id=1)
    before = Adapters().fingerprint(lora)
    (tmp_path / file).write_bytes(b"two")
    os.utime(tmp_path / file, ns=(1, 1))
    assert Adapters().fingerprint(lora) != before


def test_weights_replaced_by_files_of_the_same_size_and_time_are_told_apart_by_their_header(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    found = set()
    for content in (b"one", b"two"):
        weights.write_bytes(content)
        os.utime(weights, ns=(1, 1))
        found.add(compose_all(plan_model(MODELS["Llama"], tmp_path)).namespace)
    assert len(found) == 2


# Two processes.

NAMESPACE = """
import sys
from pathlib import Path
from tests.engines.vllm.planning import MODELS, compose_all, plan_model
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
plan = plan_model(MODELS[sys.argv[2]], Path(sys.argv[1]))
function = get_hash_fn_by_name(plan.vllm_config.cache_config.prefix_caching_hash_algo)
kv_cache_utils.init_none_hash(function)
first = kv_cache_utils.hash_block_tokens(function, None, (1, 2, 3))
print("found", compose_all(plan).namespace.hex(), first.hex())
"""


def found_by_another_process(folder: Path, model: str, hash_seed: str | None) -> list[str]:
    """The namespace, and the digest of a prompt's first block."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environ |= {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)]), "HF_HUB_OFFLINE": "1"}
    if hash_seed is not None:
        environ["PYTHONHASHSEED"] = hash_seed
    command = [sys.executable, "-c", NAMESPACE, str(folder), model]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return next(line for line in done.stdout.splitlines() if line.startswith("found")).split()[1:]


@pytest.mark.slow
def test_processes_agree_although_python_hashes_differently_in_each(folder: Path) -> None:
    """Without PYTHONHASHSEED, Python's own hash is seeded at random in each of them."""
    first, second = (found_by_another_process(folder, "DeepSeek-V4", None) for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_processes_agree_with_any_seed_that_both_are_given(folder: Path) -> None:
    """vLLM makes PYTHONHASHSEED the seed of its digests, so another seed is another namespace and never a wrong hit."""
    found = {seed: found_by_another_process(folder, "Llama", seed) for seed in ("0", "7")}
    assert found["7"] == found_by_another_process(folder, "Llama", "7")
    assert all(mine != theirs for mine, theirs in zip(found["0"], found["7"], strict=True))
