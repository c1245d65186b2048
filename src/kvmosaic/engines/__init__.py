"""What runs inside an engine's processes. The only package that knows torch or vLLM."""
