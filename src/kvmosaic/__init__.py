"""kvmosaic: the KV cache outside the engine, for every hybrid-attention model."""
