"""Kernels of ``scaled_experts``: 8-bit rows, each times the 8-bit weight of its expert."""
