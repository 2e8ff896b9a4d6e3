"""Kernels of ``w4a8``: int8 or e4m3 activations times packed int4 weights."""
