"""vLLM's real Scheduler with our connector in both roles, over a real server, and a worker that is a model.

The modelled worker computes nothing: the content of a page is a function of the tokens it stands for, so any wrong,
stale or missing byte is seen in the step that would read it. Free blocks hold poison.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    compute_layer_kv_cache_shape_bytes,
    iter_layer_specs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

POISON = 0xA5


def full(block: int = 16, heads: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=16, dtype=torch.bfloat16)


def window(tokens: int, block: int = 16, heads: int = 1) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=heads, head_size=16, dtype=torch.bfloat16, sliding_window=tokens
    )


def state(block: int) -> MambaSpec:
    page = full(block).page_size_bytes
    return MambaSpec(
        block_size=block,
        shapes=((3, 8), (2, 4, 4)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page,
        mamba_cache_mode="align",
    )


MODELS: dict[str, Callable[[], dict[str, KVCacheSpec]]] = {
    "full": lambda: {f"f{i}": full() for i in range(3)},
    "window": lambda: {"f0": full(), **{f"w{i}": window(40) for i in range(2)}},
    "wide window": lambda: {"f0": full(), **{f"w{i}": window(600) for i in range(2)}},
    "state": lambda: {"f0": full(32), **{f"s{i}": state(32) for i in range(3)}},
}


def vllm_config(folder: Path, connector: dict[str, Any], budget: int, block: int, num_blocks: int) -> VllmConfig:
    (folder / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,'
        ' "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 300,'
        ' "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}'
    )
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, enforce_eager=True
        ),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True, num_gpu_blocks_override=num_blocks),
        scheduler_config=SchedulerConfig(
            max_num_seqs=min(64, budget),
            max_num_batched_tokens=budget,
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="MosaicConnector",
            kv_connector_module_path="kvmosaic.engines.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config=connector,
        ),
    )
    config.cache_config.block_size = block
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


class ModelledEngine:
    """One engine. `step()` runs one engine step; `run()` until nothing is left to do."""

    def __init__(
        self,
        folder: Path,
        specs: dict[str, KVCacheSpec],
        connector: dict[str, Any],
        budget: int = 512,
        num_blocks: int = 600,
    ) -> None:
        folder.mkdir(exist_ok=True)
        states = [spec for spec in specs.values() if isinstance(spec, MambaSpec)]
        block = states[0].block_size if states else 16
        config = vllm_config(folder, connector, budget, block, num_blocks)
        if states:
            config.cache_config.mamba_cache_mode = "align"
            config.cache_config.mamba_block_size = block
        register_all_kvcache_specs(config)
        groups = get_kv_cache_groups(config, dict(specs))
        self.kv_config = get_kv_cache_config_from_groups(config, groups, 1 << 40)
        self.kv_config.kv_cache_layout = "LBHNC"
        scheduler_config = generate_scheduler_kv_cache_config([self.kv_config])
        config.cache_config.num_gpu_blocks = scheduler_config.num_blocks
        config.cache_config.block_size = min(
            group.kv_cache_spec.block_size for group in scheduler_config.kv_cache_groups
        )
        sizes = resolve_kv_cache_block_sizes(scheduler_config, config)
        for each in (self.kv_config, scheduler_config):
            each.hash_block_size = sizes[1]
            each.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(scheduler_config, config, *sizes)
        self.hash_block = sizes[1]
        tensors = allocate_kv_cache(self.kv_config, torch.device("cpu"), KVCacheLayout.LBHNC, kernel_block_sizes=None)
        storage = next(iter(tensors.values())).untyped_storage()
        self.raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        self.raw[:] = POISON
        self.worker = KVConnectorFactory.create_connector(
            config=config, role=KVConnectorRole.WORKER, kv_cache_config=self.kv_config
        )
        self.worker.register_kv_caches(tensors)
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(self.hash_block, hash_fn)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=scheduler_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=sizes[0],
            hash_block_size=sizes[1],
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.num_checks = 0
        self.external: dict[str, int] = {}

    # Work

    def add(self, name: str, tokens: list[int], max_tokens: int = 1) -> Request:
        request = Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def serve(self, name: str, tokens: list[int], max_tokens: int = 1) -> int:
        """Run one request to its end; the number of tokens that came from outside."""
        self.add(name, tokens, max_tokens)
        self.run()
        return self.external.get(name, 0)

    def drop_own_cache(self) -> None:
        assert self.scheduler.reset_prefix_cache()
        self.raw[:] = POISON

    def close(self) -> None:
        self.worker.shutdown()
        self.connector.shutdown()

    # One step of the engine, in the order of vLLM's V1 runner

    def step(self) -> None:
        waiting = {r.request_id for r in self.scheduler.requests.values() if r.num_computed_tokens == 0}
        output = self.scheduler.schedule()
        for request_id in waiting & set(self.scheduler.requests):
            stats = self.scheduler.requests[request_id].prefill_stats
            if stats is not None and stats.num_external_cached_tokens:
                self.external[request_id] = stats.num_external_cached_tokens
        worker_output = self._execute(output)
        requests = {name: self.scheduler.requests[name] for name in output.num_scheduled_tokens}
        self._poison_free_blocks()
        names = list(requests)
        tokens = [[self._next_token(r)] if r.num_computed_tokens >= r.num_tokens else [] for r in requests.values()]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=tokens,
                kv_connector_output=None if worker_output.is_empty() else worker_output,
            ),
        )

    @staticmethod
    def _next_token(request: Request) -> int:
        return 1 + sum(request.all_token_ids[-3:]) % 250

    def _execute(self, output: Any) -> KVConnectorOutput:
        worker = self.worker
        worker.bind_connector_metadata(output.kv_connector_metadata)
        # A request may share the blocks that another one fills in the same step.
        for name, num_tokens in output.num_scheduled_tokens.items():
            self._write_pages(name, num_tokens)
        for name, num_tokens in output.num_scheduled_tokens.items():
            self._check_reads(name, num_tokens)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        report = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return report

    def _poison_free_blocks(self) -> None:
        """What no table and no hash holds is nobody's: a copy that reads it late reads poison."""
        pool = self.scheduler.kv_cache_manager.block_pool
        for block in pool.blocks[1:]:
            if block.ref_cnt == 0 and block.block_hash is None:
                for group in range(len(self.kv_config.kv_cache_groups)):
                    for _, page in self._pages(group, block.block_id):
                        page[:] = POISON

    def _tables(self, name: str) -> tuple[list[int], ...]:
        return self.scheduler.kv_cache_manager.get_block_ids(name)

    def _check_reads(self, name: str, num_tokens: int) -> None:
        request = self.scheduler.requests[name]
        start = request.num_computed_tokens - num_tokens
        for group, (spec, table) in enumerate(self._groups(name)):
            for column, block in enumerate(table[: start // spec.block_size]):
                end = (column + 1) * spec.block_size
                if block == 0 or (isinstance(spec, MambaSpec) and end != start):
                    continue
                self.num_checks += 1
                for layer, pages in self._pages(group, block):
                    want = self._content(request, group, layer, end, len(pages))
                    assert np.array_equal(pages, want), f"{name}: wrong bytes in group {group} before token {end}"

    def _write_pages(self, name: str, num_tokens: int) -> None:
        request = self.scheduler.requests[name]
        done = request.num_computed_tokens
        start = done - num_tokens
        for group, (spec, table) in enumerate(self._groups(name)):
            first, last = start // spec.block_size, math.ceil(done / spec.block_size)
            for column in range(last - 1 if isinstance(spec, MambaSpec) else first, last):
                end = (column + 1) * spec.block_size
                if table[column] == 0:
                    continue
                for layer, pages in self._pages(group, table[column]):
                    if end <= done and end // self.hash_block <= len(request.block_hashes):
                        pages[:] = self._content(request, group, layer, end, len(pages))
                    else:
                        pages[:] = done % 251

    def _groups(self, name: str) -> list[tuple[KVCacheSpec, list[int]]]:
        specs = [next(iter(iter_layer_specs(group.kv_cache_spec))) for group in self.kv_config.kv_cache_groups]
        return list(zip(specs, self._tables(name), strict=True))

    def _pages(self, group: int, block: int) -> list[tuple[str, np.ndarray]]:
        layers = set(self.kv_config.kv_cache_groups[group].layer_names)
        found = []
        for tensor in self.kv_config.kv_cache_tensors:
            for number, layer in enumerate(tensor.layers):
                if layer in layers:
                    spec = self._spec_of(group, layer)
                    base = tensor.offset + number * tensor.layer_stride + block * tensor.block_stride
                    payload = math.prod(compute_layer_kv_cache_shape_bytes(spec, 1)[1:])
                    found.append((layer, self.raw[base : base + payload]))
        return found

    def _spec_of(self, group: int, layer: str) -> KVCacheSpec:
        spec = self.kv_config.kv_cache_groups[group].kv_cache_spec
        return getattr(spec, "kv_cache_specs", {layer: spec})[layer]

    def _content(self, request: Request, group: int, layer: str, end: int, num_bytes: int) -> np.ndarray:
        block_hash = request.block_hashes[end // self.hash_block - 1]
        seed = hashlib.sha256(block_hash + f"{group}/{layer}/{end}".encode()).digest()
        return np.resize(np.frombuffer(seed, dtype=np.uint8), num_bytes)
