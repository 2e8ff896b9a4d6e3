"""Plain data of both halves: what a quantized GEMM is, and what was decided about it."""
